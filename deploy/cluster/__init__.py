"""A deployment on a Ray cluster: a controller actor that holds what is wanted, and an actor for each program."""
