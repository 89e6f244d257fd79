"""One process per rank: the room that imports torch.

    main: assignment -> environment -> process group -> load -> call the user's function -> outcome

`discovery` knows the models and optimizers there are, `sync` keeps replicas equal, `shard` deals out the loaders'
samples, `verify` proves it, `session` is what the user's function can say.
"""
