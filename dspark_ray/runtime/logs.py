"""Log lines of our actors: to stderr, where Ray shows them to the driver and keeps them per worker."""

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: int = logging.INFO) -> None:
    """Gives the program's own logger a handler, once per process; other libraries keep theirs."""
    for name in ("dspark_ray", "deployments"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(_FORMAT))
            logger.addHandler(handler)
            logger.setLevel(level)
            logger.propagate = False
