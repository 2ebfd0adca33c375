"""Several processes at one cell: which rows are whose, and the few things that ranks tell one another."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# How long a rank waits for the others. It bounds honest work (a warm-up, a slow reward) and no failure: torchrun ends
# the ranks that are left as soon as one is gone.
TIMEOUT = datetime.timedelta(days=7)
# Entries summed in one go: a bound on the memory of the copy, far above where a call's fixed cost matters.
BUCKET = 1 << 24


class RankError(RuntimeError):
    """Another rank is gone, or no longer holds what this one holds."""


@dataclass(frozen=True)
class Ranks:
    """One process's place among the `size` that share a cell, and what they do together.

    Every rank holds the model, the optimizer and whole batches; only rows to compute are split. With one rank every
    method gives back what it was given, so that the loop needs no second path.

    Attributes
    ----------
    rank, size : int
        Number of this process, from 0, and how many there are.
    local_rank : int
        Number among those of its machine: index of its CUDA device.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def single(cls) -> Ranks:
        """The only process."""
        return cls()

    @classmethod
    def from_environment(cls, device: str) -> Ranks:
        """Join the processes that torchrun started; gloo between CPUs, NCCL between CUDA devices."""
        import torch
        from torch import distributed

        local_rank, on_cuda = int(os.environ["LOCAL_RANK"]), device.startswith("cuda")
        if on_cuda:
            torch.cuda.set_device(local_rank)  # "cuda" then means this device
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=TIMEOUT)
        return cls(distributed.get_rank(), distributed.get_world_size(), local_rank)

    @property
    def leads(self) -> bool:
        """True for the one rank that writes files."""
        return self.rank == 0

    @property
    def map_location(self) -> dict[str, str] | None:
        """Where tensors of a checkpoint go, which the first rank wrote from its device."""
        return None if self.size == 1 else {"cuda:0": f"cuda:{self.local_rank}"}

    def span(self, count: int) -> slice:
        """This rank's part of `count` rows: contiguous, in the order of ranks, sizes at most one apart."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def share(self, rows: Tensor) -> Tensor:
        """This rank's part of the first dimension."""
        return rows[self.span(len(rows))]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Put into every tensor its sum over ranks, the same bits on each of them."""
        for bucket in self._buckets(tensors):
            self._sum_bucket(bucket)

    def _buckets(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Tensors of one type, in order, a bounded number of entries at a time; none for a single rank."""
        bucket: list[Tensor] = []
        for tensor in tensors if self.size > 1 else ():
            full = sum(t.numel() for t in bucket) + tensor.numel() > BUCKET
            if bucket and (full or tensor.dtype != bucket[0].dtype):
                yield bucket
                bucket = []
            bucket.append(tensor)
        if bucket:
            yield bucket

    def _sum_bucket(self, bucket: Sequence[Tensor]) -> None:
        import torch
        from torch import distributed

        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        with _hearing():
            distributed.all_reduce(flat)
        for tensor, total in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Every tensor with the rows of all ranks, in their order; shapes must be the same on each of them."""
        if self.size == 1:
            return list(tensors)
        import torch
        from torch import distributed

        # As bytes, so that one call carries tensors of any type; bytes also keep every NaN as it is.
        packed = torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])
        found = [torch.empty_like(packed) for _ in range(self.size)]
        with _hearing():
            distributed.all_gather(found, packed)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        split = [torch.split(other, sizes) for other in found]
        return [
            torch.cat([pieces[i].clone().view(tensor.dtype).view(tensor.shape) for pieces in split])
            for i, tensor in enumerate(tensors)
        ]

    def numbers(self, value: float) -> list[float]:
        """`value` of every rank, in their order."""
        import torch

        (found,) = self.gather([torch.tensor([value], dtype=torch.float64)])
        return [float(number) for number in found]

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on some rank."""
        import torch

        (found,) = self.gather([torch.tensor([flags])])
        return tuple(bool(flag) for flag in found.any(0))

    def check_same(self, what: str, value: float) -> None:
        """Raise `RankError` unless all ranks hold the same number: from then on their records would mean nothing."""
        found = {repr(number) for number in self.numbers(value)}
        if len(found) > 1:
            raise RankError(f"{what} differs between ranks: {', '.join(sorted(found))}")

    def take_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite every tensor with the first rank's."""
        from torch import distributed

        for tensor in tensors if self.size > 1 else ():
            with _hearing():
                distributed.broadcast(tensor, src=0)

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Let the first rank do what is inside before the others do it: for files that it makes and they read."""
        if not self.leads:
            self.any(False)
        yield
        if self.leads:
            self.any(False)


@contextmanager
def _hearing() -> Iterator[None]:
    """Tell a user what a failed collective most often means."""
    try:
        yield
    except RuntimeError as error:
        raise RankError("another rank ended early; what it printed, and how it ended, is in log.txt") from error


SINGLE = Ranks.single()
