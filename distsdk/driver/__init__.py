"""The user's process: what is decorated, called, waited for and returned.

    decorator: a call -> shipping: a parcel -> job: a future -> run: the story of one run -> result

`group` decides without I/O, `run` performs, `history`, `logs`, `display` and `failure` make what the user sees.
"""
