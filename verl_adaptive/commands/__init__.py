"""The commands of ``verl-adaptive``, a module each: ``configure(parser)`` adds its arguments, ``run(args)`` does it."""
