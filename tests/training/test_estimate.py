"""The dry run's arithmetic, and the plan of steps."""

import subprocess
import sys

import pytest

from shortlist.config import build_config
from shortlist.errors import ConfigError
from shortlist.training.estimate import (
    MIB,
    ModelSize,
    StepSize,
    activations,
    estimate_memory,
    free_vectors,
    model_size,
    pool_size,
    size,
    sized,
    step_size,
)
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


def test_pool_size_adds_what_every_source_brings():
    assert pool_size(config(data={"negatives": "all"}), 1000) == 1000
    assert pool_size(config(training={"batch_size": 8}), 1000) == 8
    assert pool_size(config(training={"batch_size": 8}), 1000, positives=3.3) == 27
    assert pool_size(config(training={"batch_size": 8, "max_positives": 2}), 1000, positives=3.3) == 16
    bm25 = config(
        data={"negatives": "bm25", "num_negatives": 3},
        training={"batch_size": 8, "max_positives": 2},
    )
    assert pool_size(bm25, 1000, positives=2.5) == 40
    assert pool_size(bm25, 10) == 10
    # sampled counts once a batch, mined for each query.
    mixed = config(data={"negatives": ["sampled(100)", "mined(2)"]}, training={"batch_size": 8})
    assert pool_size(mixed, 1000) == 8 * 3 + 100
    assert pool_size(mixed, 1000, queries=16) == 16 * 3 + 100


def test_a_step_on_several_devices_has_a_larger_batch_and_a_part_of_the_pool_each():
    settings = config(data={"negatives": "all"}, training={"batch_size": 8}, model={"query_max_length": 16})
    model = ModelSize(1000, 1000, 2, 16, 4, max_length=64)
    step = step_size(settings, model, 1001, processes=4)
    assert (step.queries, step.own_queries, step.documents, step.own_documents) == (32, 8, 1001, 251)
    assert (step.query_length, step.document_length) == (16, 64)
    assert step.tokens == 8 * 16 + 251 * 64
    static = ModelSize(1000, 1000, 0, 16)
    assert step_size(config(), static, 10, lengths=(64, 256)).document_length == 256


def estimated(step, documents=100, **sections):
    settings = config(**sections)
    model = sized(1000, 2, 16, 4, 64, settings)
    return estimate_memory(settings, model, step, documents=documents, score_memory=MIB)


STEP = StepSize(queries=2, documents=3, own_queries=2, own_documents=3, query_length=8, document_length=16)


def test_memory_is_weights_gradients_two_moments_activations_vectors_scores_and_tokens():
    memory = estimated(STEP)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4000, 4000, 8000)
    assert memory.activations == (2 * 8 + 3 * 16) * 34 * 16 * 2 * 2
    assert memory.vectors == (2 + 3) * 16 * 4 * 2
    assert memory.scores == 2 * 2 * 3 * 4
    assert memory.inputs == (2 * 8 + 3 * 16) * 8 * 2
    assert memory.total == sum(memory.parts().values()) and len(memory.lines()) == 8
    assert estimated(STEP, training={"optim": "sgd"}).optimizer == 0
    half = estimate_memory(config(), sized(1000, 2, 16, 4, 64, config()), STEP, documents=100, half=True)
    assert half.activations == memory.activations / 2 and half.weights == 6000


def test_lora_and_a_frozen_encoder_train_less():
    lora = sized(1000, 2, 16, 4, 64, config(model={"lora": {"r": 2}}))
    assert lora.trainable == 6 * 2 * 2 * 16 * 2
    frozen = estimated(STEP, model={"freeze_encoder": True, "document_side": "vectors"})
    assert frozen.gradients == 100 * 17 * 4 and frozen.weights == 4000 + 100 * 17 * 4
    assert frozen.activations < estimated(STEP).activations


def test_free_vectors_count_as_parameters():
    assert free_vectors(config(), 100, 16) == 0
    assert free_vectors(config(model={"document_side": "text_and_vectors"}), 100, 16) == 1600
    assert free_vectors(config(model={"document_side": "vectors"}), 100, 16) == 1700


def test_with_the_cache_activations_are_flat_in_the_documents_and_vectors_are_not():
    def step(documents):
        return StepSize(512, documents, 512, documents, 32, 32)

    cached = [
        estimated(step(count), training={"micro_batch_size": 64}, data={"negatives": "all"})
        for count in (4096, 131_072, 1_310_720)
    ]
    assert len({memory.activations for memory in cached}) == 1
    assert cached[2].vectors > 9 * cached[1].vectors > 90 * cached[0].vectors
    assert {memory.scores for memory in cached} == {MIB}
    plain = estimated(step(4096), data={"negatives": "all"})
    assert plain.activations > 50 * cached[0].activations
    # A side that fits one micro-batch keeps its graph.
    settings = config(training={"micro_batch_size": 512})
    model = sized(1000, 2, 16, 4, 64, settings)
    both = estimate_memory(settings, model, step(4096), documents=4096).activations
    assert both == 2 * activations(settings, model, 512, 32, 16, half=False)


def test_a_loss_that_is_not_computed_in_blocks_holds_the_matrix():
    settings, model = config(), ModelSize(1000, 1000, 2, 16, 4, 64)
    step = StepSize(100, 10_000, 100, 10_000, 8, 8)
    dense = estimate_memory(settings, model, step, documents=10_000, score_memory=MIB, blocks=False)
    assert dense.scores == 4 * 100 * 10_000 * 4
    assert estimate_memory(settings, model, step, documents=10_000, score_memory=MIB).scores == MIB


def test_model_size_reads_headers_only(tiny_transformer, tiny_static):
    measured = model_size(tiny_transformer, config())
    assert measured.layers == 2 and measured.width == 32 and measured.heads == 4 and measured.max_length == 64
    assert measured.parameters > 10_000
    assert model_size(tiny_transformer, config(model={"shared": False})).parameters == 2 * measured.parameters
    static = model_size(tiny_static, config())
    assert static.layers == 0 and static.width == 16


def test_sizes_for_people():
    assert [size(count) for count in (10, 2048, 3 * 2**30)] == ["10 B", "2.00 KiB", "3.00 GiB"]


PEAK = """
import sys, torch, re
from transformers import BertConfig, BertModel
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
torch.set_num_threads(1)
model = BertModel(BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
                             intermediate_size=512, hidden_dropout_prob=0.1)).train()
texts, length = 128, 64
ids = torch.randint(0, 1000, (texts, length))
model(input_ids=ids[:4]).last_hidden_state.sum().backward()
before = anonymous()
kept = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
sys.stdout.write(str(anonymous() - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_activations_of_a_small_transformer_are_within_a_factor_of_two_of_what_is_measured():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    measured = int(done.stdout)
    model = ModelSize(0, 0, layers=4, width=128, heads=4, max_length=512)
    expected = activations(config(), model, 128, 64, 128, half=False)
    assert measured / 2 < expected < measured * 2, (measured, expected)
