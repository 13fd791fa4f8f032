"""Two parts of a third party in one module, which says of itself what neither of them does."""

from verl_adaptive.filters.keep_all import KeepAll


class Long(KeepAll):
    """Drops groups whose answers are short. Not really."""

    name = "Long"


class Short(KeepAll):
    """Drops groups whose answers are long. Not really."""

    name = "Short"
