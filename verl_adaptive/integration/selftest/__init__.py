"""``verl-adaptive selftest``: a tiny model through the real pipeline, in the environment that one trains in.

* :mod:`.tiny`: data, model, and what the model is taught; :mod:`.reward` scores its answers.
* :mod:`.runs`: runs as processes of their own, and what they left.
* :mod:`.verdicts`: what must hold of a run.
* :mod:`.gradient`: rows of zero advantage, left out and kept, on this machine's devices and ranks.
* :mod:`.suite`: all of it, and the page.

The tests of the pipeline use the same modules.
"""
