"""The dry run's arithmetic, and the plan of steps."""

import pytest

from shortlist.config import build_config
from shortlist.errors import ConfigError
from shortlist.training.estimate import ModelSize, estimate_memory, model_size, pool_size, size, sized, tokens_per_step
from shortlist.training.plan import plan_steps


def config(**sections):
    return build_config(sections)


def test_plan_counts_batches_steps_and_fractions():
    training = config(
        training={"batch_size": 4, "num_train_epochs": 2.5, "warmup_steps": 0.1, "eval_steps": 0.25}
    ).training
    plan = plan_steps(10, training)
    assert (plan.batches_per_epoch, plan.steps_per_epoch, plan.total_steps) == (3, 3, 8)
    assert (plan.warmup_steps, plan.eval_every, plan.save_every) == (1, 2, 2)
    grouped = config(training={"batch_size": 4, "gradient_accumulation_steps": 2, "drop_last": True}).training
    assert plan_steps(10, grouped).steps_per_epoch == 1
    assert plan_steps(10, config(training={"max_steps": 7, "warmup_steps": 3.0}).training).warmup_steps == 3


def test_plan_of_zero_steps_is_an_error():
    # user-reports B.53
    with pytest.raises(ConfigError, match="3 training queries make zero batches of 4"):
        plan_steps(3, config(training={"batch_size": 4, "drop_last": True}).training)


def test_pool_size_by_kind_of_negatives():
    assert pool_size(config(data={"negatives": "all"}), 1000) == 1000
    assert pool_size(config(training={"batch_size": 8}), 1000) == 8
    bm25 = config(data={"negatives": "bm25", "num_negatives": 3}, training={"batch_size": 8, "max_positives": 2})
    assert pool_size(bm25, 1000) == 40
    assert pool_size(bm25, 10) == 10


def test_memory_is_weights_gradients_two_moments_activations_and_scores():
    settings = config(
        training={"batch_size": 2, "dtype": "float32"}, model={"query_max_length": 8, "doc_max_length": 8}
    )
    model = ModelSize(parameters=1000, trainable=1000, layers=2, width=16, heads=4, max_length=64)
    tokens = tokens_per_step(settings, 100, longest=64, query=0, document=0)
    assert tokens == 2 * 8 + 2 * 8
    memory = estimate_memory(settings, model, 100, tokens, 16)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4000, 4000, 8000)
    assert memory.activations == 2 * 32 * (34 * 16 + 5 * 4 * 8) * 2
    assert memory.scores == 2 * 2 * 4 * 4
    assert memory.total == sum((4000, 4000, 8000, memory.activations, memory.scores))
    lora = sized(1000, 2, 16, 4, 64, config(model={"lora": {"r": 2}}))
    assert lora.trainable == 6 * 2 * 2 * 16 * 2


def test_model_size_reads_headers_only(tiny_transformer):
    measured = model_size(tiny_transformer, config())
    assert measured.layers == 2 and measured.width == 32 and measured.heads == 4 and measured.max_length == 64
    assert measured.parameters > 10_000
    assert model_size(tiny_transformer, config(model={"shared": False})).parameters == 2 * measured.parameters


def test_sizes_for_people():
    assert [size(count) for count in (10, 2048, 3 * 2**30)] == ["10 B", "2.00 KiB", "3.00 GiB"]
