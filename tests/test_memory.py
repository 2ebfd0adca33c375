"""The memory estimate: every term by hand, what moves it and by how much, and measured peaks."""

from dataclasses import replace

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import stalefront.memory as module
from stalefront.cell import Cell
from stalefront.memory import (
    CUDA_CONTEXT,
    CUDA_HOST,
    PROCESS,
    CellMemory,
    Lengths,
    ModelShape,
    activation_bytes,
    average_bytes,
    batches_bytes,
    cache_bytes,
    cell_bytes,
    controllers_bytes,
    gradient_bytes,
    loading_bytes,
    logits_bytes,
    model_shape,
    optimizer_bytes,
    plain_shape,
    prompt_lengths,
    ranks_bytes,
    sampling_bytes,
    training_bytes,
    updater_bytes,
    versions_bytes,
    warmup_bytes,
    weights_bytes,
)
from stalefront.ranks import BUCKET

SHAPE = ModelShape(
    parameters=1000, state_entries=1200, vocab=20, layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1,
    head_dim=4, eager=False,
)  # fmt: skip
LENGTHS = Lengths(prompt=10, answer=5)
# SmolLM2-135M by its sizes; a tokenizer makes at most 76 tokens of a prompt of task=additions.
SMOL = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
SMOL_LENGTHS = Lengths(prompt=76, answer=0)


def smol_cell(make_cell, **overrides) -> Cell:
    return make_cell(task="additions", **{"model.config": SMOL, "model.warmup": None} | overrides)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (weights_bytes(1000, 2), 4000),
        (gradient_bytes(1000, 2), 2000),
        (optimizer_bytes(1000, 4, "adamw"), 8000),
        (optimizer_bytes(1000, 4, "sgd"), 0),
        (optimizer_bytes(1000, 4, "nsgd"), 0),
        (updater_bytes(1000), 36_000),
        (versions_bytes(SHAPE, 2, 0), 0),
        (versions_bytes(SHAPE, 2, 3), 2 * 1000 * 5),
        (batches_bytes(4, 10, 1), 3 * 4 * (46 * 10 + 57)),
        (controllers_bytes(1000, ["vcpo", "gac"]), 8000),
        (average_bytes(1000, 4), 4000),
        (average_bytes(1000, 2), 6000),
        (logits_bytes(3, 7, SHAPE), 24 * 3 * 7 * 20),
        (ranks_bytes(SHAPE, 2, 1), 0),
        (ranks_bytes(SHAPE, 2, 4), 2 * BUCKET),
        (activation_bytes(SHAPE, 3, 5, 4), 2 * 3 * 5 * 4 * (12 * 8 + 4 * 16)),
        (activation_bytes(SHAPE, 3, 5, 2), 2 * 3 * 5 * (4 * 48 + 2 * 48 + 2 * 64)),
        (activation_bytes(replace(SHAPE, eager=True), 1, 5, 4), 2 * 5 * 4 * 160 + 2 * 2 * 25 * 8),
        (cache_bytes(SHAPE, 3, 5, 2), 3 * 5 * 2 * 2 * 4 * 2),
        (sampling_bytes(SHAPE, 3, 5, 4), 2 * 960 + 3 * 5 * 4 * 160 + 3 * 20 * 40),
        (loading_bytes(1000, 2), 6000),
    ],
)
def test_a_term_by_hand(found, expected):
    assert found == expected


def test_a_cell_by_hand(make_cell):
    """The sum over the terms: 2 × 3 sequences in two micro-batches of 3, 10 + 4 tokens, 16 validations."""
    cell = make_cell(
        **{"task.num_prompts": 2, "task.num_generations": 3, "task.max_completion_length": 4},
        **{"optimizer.grad_accum": 2, "model.warmup": None},
    )
    held = 8000 + 4000 + 8000 + 36_000 + 2 * 6 * (46 * 14 + 57)
    learn = 2 * 3 * 14 * 640 + 24 * 3 * 5 * 20
    sample = 2 * (16 * 14 * 2 * 2 * 4 * 4) + 16 * 14 * 640 + 16 * 20 * 40
    assert training_bytes(cell, SHAPE, LENGTHS) == held + max(learn, sample)
    assert warmup_bytes(cell, SHAPE, LENGTHS) == 0


def test_a_warmup_by_hand(make_cell):
    cell = make_cell(**{"model.warmup.batch_size": 3})
    assert warmup_bytes(cell, SHAPE, LENGTHS) == 16_000 + 2 * 3 * 16 * 640 + 24 * 3 * 16 * 20


def test_kept_versions_add_that_many_copies(make_cell):
    def with_lag(lag: int, via: str) -> int:
        cell = make_cell(delay="lag", **{"delay.lag_updates": lag, "delay.via": via})
        return training_bytes(cell, SHAPE, LENGTHS)

    one, two, four = (with_lag(lag, "weights") for lag in (1, 2, 4))
    assert (two - one, four - two) == (4 * 1000, 2 * 4 * 1000)
    assert one - with_lag(0, "weights") == 4 * 3 * 1000
    batch = 64 * (46 * 16 + 57)
    assert with_lag(4, "data") - with_lag(2, "data") == 2 * batch
    assert with_lag(0, "data") == with_lag(0, "weights")


def test_micro_batches_ranks_and_reuse(make_cell):
    """Parts, micro-batches and ranks cut the rows of a backward alike; S alone costs nothing."""
    big = replace(SHAPE, vocab=100_000)
    overrides = {"validation.num_samples": 1, "task.num_prompts": 8, "task.num_generations": 2}

    def learn(**more) -> int:
        return training_bytes(make_cell(validation={"every": 1, "num_samples": 1}, **overrides | more), big, LENGTHS)

    whole = learn(**{"delay.S": 1})
    assert learn(**{"delay.S": 4}) == whole
    halved = learn(**{"optimizer.grad_accum": 2})
    assert whole - halved == activation_bytes(big, 8, 16, 4) + logits_bytes(8, 7, big)
    assert learn(**{"delay.S": 2, "delay.minibatches": 2}) == halved
    assert learn(**{"model.ranks": 2}) == halved + ranks_bytes(big, 4, 2)


def test_the_optimizer_and_the_type_count(make_cell):
    by_kind = {kind: training_bytes(make_cell(optimizer=kind), SHAPE, LENGTHS) for kind in ("adamw", "sgd", "nsgd")}
    assert by_kind["adamw"] - by_kind["sgd"] == 8000
    assert by_kind["nsgd"] == by_kind["sgd"]
    half = training_bytes(make_cell(**{"model.dtype": "bfloat16"}), SHAPE, LENGTHS)
    assert half < by_kind["adamw"]


def test_devices(make_cell, monkeypatch):
    monkeypatch.setattr(module, "model_shape", lambda _: SHAPE)
    on_cpu, on_mac, on_cuda = (cell_bytes(make_cell(device=device)) for device in ("cpu", "mps", "cuda:1"))
    assert on_cpu == on_mac
    assert on_cpu.device_bytes == 0
    tensors = on_cpu.host_bytes - PROCESS["native"]
    assert on_cuda == CellMemory(PROCESS["native"] + CUDA_HOST + 8000, CUDA_CONTEXT + tensors)


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        ({"validation": {"every": 4, "num_samples": 8}}, 9_789_210_624),
        ({"validation": {"every": 4, "num_samples": 8}, "engine": "trl"}, 8_450_142_208),
    ],
    ids=["native", "trl"],
)
def test_smollm2_lies_between_its_measured_peak_and_1_6_times_it(make_cell, overrides, measured):
    """Peak resident size of a cell of two or more steps, on two CPU cores with torch 2.13."""
    cell = smol_cell(make_cell, **overrides)
    estimate = PROCESS[cell.engine.choice()] + training_bytes(cell, plain_shape(SMOL), SMOL_LENGTHS)
    assert measured <= estimate <= 1.6 * measured


def test_a_tiny_cell_lies_between_its_measured_peaks(make_cell):
    """Forked from the warm parent, and in an interpreter of its own."""
    estimate = cell_bytes(make_cell()).host_bytes
    assert 412 * 2**20 <= estimate <= 1.6 * 362_053_632


def test_an_average_and_a_controller_add_vectors(make_cell):
    plain = training_bytes(make_cell(), SHAPE, LENGTHS)
    assert training_bytes(make_cell(proximal="ema"), SHAPE, LENGTHS) - plain == 4000
    assert training_bytes(make_cell(controller=["gac", "update_cap"]), SHAPE, LENGTHS) - plain == 16_000


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_plain_model_is_counted_as_torch_counts_it(conf_choice, tied, kv_heads):
    config = conf_choice("model", "tiny")["config"] | {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    options = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(options.pop("model_type"), **options))
    shape = plain_shape(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.state_entries == sum(value.numel() for value in model.state_dict().values())
    assert (shape.head_dim, shape.eager) == (8, model.config._attn_implementation == "eager")


def test_known_sizes(make_cell):
    assert model_shape(make_cell().model).parameters == 21_664
    assert plain_shape(SMOL).parameters == 134_515_008
    assert prompt_lengths(make_cell()) == Lengths(prompt=7, answer=5)
    assert prompt_lengths(make_cell(**{"model.warmup": None})) == Lengths(prompt=7, answer=0)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {"model_type": "qwen3", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        {"model_type": "mixtral", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ],
    ids=lambda config: config["model_type"],
)  # fmt: skip
def test_other_architectures(make_cell, config):
    model = make_cell(**{"model.config": config, "model.warmup": None}).model
    shape = model_shape(model)
    built = model.build(model.tokenizer(), seed=0)
    assert shape.parameters == sum(p.numel() for p in built.parameters())
    kind = config["model_type"]
    sizes = (shape.intermediate, shape.kv_heads, shape.head_dim)
    assert sizes == {"gpt2": (128, 4, 8), "qwen3": (48, 2, 16), "mixtral": (96, 2, 8)}[kind]


def test_a_checkpoint_folder(make_cell, tmp_path):
    tiny = make_cell()
    tokenizer = tiny.model.tokenizer()
    tiny.model.build(tokenizer, seed=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = {"model.checkpoint": str(tmp_path), "model.config": None, "model.warmup": None}
    found = cell_bytes(make_cell(**loaded))
    assert found == cell_bytes(make_cell(**{"model.warmup": None}))
    # The weights are not read.
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    module._SHAPES.clear()
    assert cell_bytes(make_cell(**loaded)) == found


def test_a_hub_id_is_looked_up_in_the_cache(make_cell, tmp_path, monkeypatch):
    plain = make_cell(**{"model.warmup": None})
    commit, repository = "0" * 40, tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    tokenizer = plain.model.tokenizer()
    plain.model.hf_config(tokenizer).save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub = {"model.checkpoint": "owner/name", "model.config": None, "model.warmup": None}
    assert cell_bytes(make_cell(**hub)) == cell_bytes(plain)


def test_what_would_need_a_download_is_unknown(make_cell):
    hub = {"model.checkpoint": "nobody/has-this-model", "model.config": None, "model.warmup": None}
    assert cell_bytes(make_cell(**hub)) is None


def test_a_model_is_looked_at_once(make_cell, monkeypatch):
    config = {"model_type": "gpt2", "vocab_size": 17, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    calls = []
    inspect = module._inspected_shape
    monkeypatch.setattr(module, "_inspected_shape", lambda model: calls.append(model) or inspect(model))
    for seed in range(5):
        cell_bytes(make_cell(seed=seed, **{"model.config": config, "model.warmup": None, "optimizer.lr": 1e-4}))
    assert len(calls) == 1


def test_modules_of_the_samplers_own_are_counted(make_cell):
    def needed(**options) -> int:
        return training_bytes(make_cell(**options), SHAPE, LENGTHS)

    plain = needed()
    assert needed(mismatch=["logit_noise"]) == plain
    assert needed(mismatch=["fp8"]) - plain == 4 * 1000
    assert needed(mismatch=["bf16"]) - plain == 2 * 1000
    # A module that is filled, a module for the older weights, and two versions of them.
    assert needed(mismatch=["stale_kv"], **{"delay.S": 1}) - plain == 4 * 1000 * (1 + 1 + 2)


def test_routes_and_kept_ids_are_counted(make_cell):
    shape = replace(SHAPE, route_bytes=8)
    plain, kept = make_cell(), make_cell(mismatch=["top_k"], **{"mismatch.top_k.keep_mask": True})
    tokens = 2 * 64 * (10 + plain.task.max_completion_length)
    assert training_bytes(plain, shape, LENGTHS) - training_bytes(plain, SHAPE, LENGTHS) == tokens * 2 * 8
    more = training_bytes(kept, SHAPE, LENGTHS) - training_bytes(plain, SHAPE, LENGTHS)
    assert more == tokens * 4 * min(SHAPE.vocab, 256)


def test_routes_of_a_mixture_of_experts_are_found(make_cell):
    shape = model_shape(make_cell(model="tiny_moe").model)
    assert shape.route_bytes == 2 * 2 * 2
    assert model_shape(make_cell().model).route_bytes == 0
