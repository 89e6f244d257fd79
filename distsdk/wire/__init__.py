"""All that crosses a process boundary.

    driver  --Open Launch Stop-->       agent  --Assign Stop Release-->  worker
    driver  <--Ready Started Printed--  agent  <--Reported Noted-------  worker
            <--Ended Exited Failed----         <--Fingerprinted Ended--
                                        agent  --Fork-->                 forkserver
                                        agent  <--Forked Reaped--------

`messages` says what is said, `channel` carries it with open descriptors, `memory` holds large payloads outside the
messages, `pickling` turns the user's objects into opaque parcels. Only driver and worker ever unpack a parcel.
"""
