"""Data sets: numbered uint8 images and labels, read by the chunk.

`TestSet` is what the rest of the package reads; `TensorSet` holds one in memory; `digits.load` gives one that ships
with the package.
"""

from testtime.data.sets import Chunk, DataError, TensorSet, TestSet

__all__ = ["Chunk", "DataError", "TensorSet", "TestSet"]
