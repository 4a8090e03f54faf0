"""A load in five steps, and the record that it leaves on the model, by which it is saved and reported on."""

from patcher.loading.applying import applied
from patcher.loading.record import record_of

__all__ = ["applied", "record_of"]
