"""How one agent per node comes to life: `base` is the waist, `registry` knows the names, one file a backend."""
