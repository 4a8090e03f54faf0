"""One load as five steps, and what it leaves on the model: the record, by which it is saved and reported on."""

from patcher.loading.applying import applied
from patcher.loading.record import record_of

__all__ = ["applied", "record_of"]
