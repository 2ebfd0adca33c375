"""The one kind of model: an ordinary causal language model of transformers."""

from __future__ import annotations

from dataclasses import dataclass

from stalefront.model import Model


@dataclass(frozen=True)
class CausalLM(Model):
    """See `stalefront.model.Model`; the files of `conf/model/` are presets of it."""
