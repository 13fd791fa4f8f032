"""The ``verl.plugins`` entry point: verl imports this module in each of its processes, while verl itself is being imported."""

from verl_cpu import register

register()
