"""The long loop of training; `make test` runs it at a small size."""

import random

from tests.integration.test_end_to_end import kill_while_training


def test_thirty_kills(tmp_path):
    """A checkpoint after every step, 30 kills at random moments of starting, training, probing and writing."""
    rng = random.Random(0)
    delays = [rng.uniform(0, 8) for _ in range(45)]  # the process takes some seconds to get going
    assert kill_while_training(tmp_path, ["shapes", "--epochs", "400", "--probe-every", "20"], delays) >= 30
