"""The GPU worker: queue -> engine -> store. One process, one device, one model."""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch asks for huge pages: a snapshot's memory is had much faster
