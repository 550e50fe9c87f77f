"""RetrievalAccuracy: the cross-test as a metric."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_kit.compat.pipelines import RetrievalAccuracy
from trainer_kit.errors import UsageError

GALLERY = [[5.0, 0], [0, 0.1], [-1, -1]]
QUERIES = np.float32([[0.2, 0.1], [0.1, 3], [0, -1], [-7, 0.5]])


def test_the_nearest_by_angle_decides() -> None:
    metric = RetrievalAccuracy(GALLERY, [1, 2, 3])
    metric.update_state(np.array([1, 2, 1, 3]), QUERIES)

    assert float(metric.result()) == 0.75

    metric.update_state(np.array([2, 1]), QUERIES[:2])
    assert float(metric.result()) == 0.5


def test_labels_may_be_rows_or_a_column() -> None:
    metric = RetrievalAccuracy(GALLERY, np.eye(4)[[1, 2, 3]])
    metric.update_state(np.eye(4)[[1, 2]], QUERIES[:2])
    metric.update_state(np.array([[3], [1]]), QUERIES[2:])

    assert float(metric.result()) == 0.75


def test_a_gallery_without_labels_is_an_error() -> None:
    message = r"give embeddings \[examples, size\] and one label for each"
    with pytest.raises(UsageError, match=message):
        RetrievalAccuracy(GALLERY, [1, 2])
