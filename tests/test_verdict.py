"""Verdicts: only what is measured, finite, complete and below every limit is admitted."""

import math

import pytest
from samples import METHOD, budget, calibrated, measurement, prompt_means, sources, summary, trained

from opdcheck.budget import Change
from opdcheck.config import Decision, Noise, Rollout, Sampling, Staleness
from opdcheck.errors import BudgetInvalidError
from opdcheck.measurement import Part, SourceShare
from opdcheck.verdict import Target, reach, target, targets

GOOD = measurement(0.0017, prompts=64)
BAD = measurement(0.0424, prompts=64)
BF16 = Rollout()


def limits(**changes):
    return budget(limits={"total": {"k3": 0.015}, **changes})


def verdict(measured, against=None, *, decision=None, rollout=BF16, **options):
    return reach(measured, against or budget(), decision or Decision(), rollout, **options)


def codes(found, effect):
    return [reason.code for reason in found.reasons if reason.effect == effect]


class TestTotal:
    def test_admit(self):
        found = verdict(GOOD)
        assert (found.decision, found.exit_code, found.against) == ("admit", 0, [])
        assert found.interval[0] <= found.mean <= found.interval[1] <= found.limit

    def test_reject(self):
        found = verdict(BAD)
        assert (found.decision, found.exit_code) == ("reject", 1)
        assert found.interval[0] > found.limit
        assert "is above the limit 0.015" in found.against[0].text

    def test_near_the_limit_is_inconclusive(self):
        found = verdict(measurement(0.0149, prompts=16))
        assert (found.decision, found.exit_code) == ("inconclusive", 3)
        assert "lies inside the interval after 16 prompts" in found.against[0].text

    @pytest.mark.parametrize("k3", [1e-5, 0.0424])
    def test_too_few_prompts(self, k3):
        found = verdict(measurement(k3, prompts=4))
        assert found.decision == "inconclusive"
        assert "4 prompts of the 8 needed" in found.against[0].text

    def test_no_prompts(self):
        nothing = {metric: [] for metric in GOOD.prompt_values}
        assert verdict(GOOD.model_copy(update={"prompt_values": nothing})).decision == "inconclusive"

    def test_kernel_floor_is_the_budgets(self):
        assert verdict(GOOD).kernel_floor == 0.0017
        assert verdict(GOOD, budget(floor=None)).kernel_floor is None


class TestTarget:
    def test_only_metric(self):
        assert target(budget(), Decision(), BF16) == Target("k3", 0.015)

    def test_tv_where_there_are_several(self):
        several = budget(limits={"total": {"k3": 0.015, "tv": 0.05}})
        assert target(several, Decision(), BF16) == Target("tv", 0.05)
        assert target(several, Decision(metric="k3"), BF16) == Target("k3", 0.015)

    def test_several_without_tv_and_no_choice(self):
        with pytest.raises(BudgetInvalidError, match="has no limit for tv, only for k3, kl"):
            target(budget(limits={"total": {"k3": 0.015, "kl": 0.05}}), Decision(), BF16)

    def test_the_strictest_of_the_candidates_sources(self):
        by_source = {"noise": {"k3": 0.04}, "quantization": {"k3": 0.02}, "staleness": None}
        differing = budget(limits={"total": {"k3": 0.01}, "total_by_source": by_source})
        noisy = Rollout(noise=Noise(weights=0.1))
        assert target(differing, Decision(), noisy) == Target("k3", 0.04, "noise")
        both = noisy.model_copy(update={"kv_cache_dtype": "fp8"})
        assert target(differing, Decision(), both) == Target("k3", 0.02, "quantization")
        assert target(differing, Decision(), BF16) == Target("k3", 0.01)
        with pytest.raises(BudgetInvalidError, match="no limit for staleness: its calibration could certify none"):
            target(differing, Decision(), Rollout(staleness=Staleness(lag=2)))
        found = verdict(measurement(0.0424, prompts=64), differing, rollout=both)
        assert (found.limit, found.limit_of) == (0.02, "quantization")
        assert "above the limit 0.02 (that of quantization)" in found.against[0].text

    def test_every_metric_is_held_to_the_strictest_of_the_sources(self):
        limits = {"total": {"tv": 0.1, "k3": 0.02}, "total_by_source": {"noise": {"k3": 0.01}}}
        noisy = Rollout(noise=Noise(weights=0.1))
        assert targets(budget(limits=limits), Decision(), noisy) == [Target("tv", 0.1), Target("k3", 0.01, "noise")]

    def test_a_source_that_was_not_calibrated_is_held_to_the_total(self):
        by_source = {"noise": {"k3": 0.04}, "quantization": {"k3": 0.02}}
        differing = budget(limits={"total": {"k3": 0.01}, "total_by_source": by_source})
        stale = Rollout(noise=Noise(weights=0.1), staleness=Staleness(lag=2))
        assert target(differing, Decision(), stale) == Target("k3", 0.01)

    def test_quantization_by_the_engines_own_arguments_counts(self):
        differing = budget(limits={"total": {"k3": 0.02}, "total_by_source": {"quantization": None, "noise": None}})
        for args in ({"quantization": "fp8"}, {"quantization_config": {"linear_scheme": "fp8_per_tensor"}}):
            with pytest.raises(BudgetInvalidError, match="no limit for quantization"):
                target(differing, Decision(), Rollout(engine_args=args))
        assert target(differing, Decision(), Rollout(engine_args={"max_model_len": 64})) == Target("k3", 0.02)

    def test_a_dtype_that_was_not_calibrated_is_held_to_the_total_as_well(self):
        by_source = {"noise": {"k3": 0.04}}
        differing = budget(limits={"total": {"k3": 0.01}, "total_by_source": by_source})
        noisy = Rollout(noise=Noise(weights=0.1), dtype="float16")
        assert target(differing, Decision(), noisy) == Target("k3", 0.01)
        evidence = [trained().evidence[0].model_copy(update={"rollout": {"dtype": "float16"}})]
        with_it = calibrated(limits={"total": {"k3": 0.01}, "total_by_source": by_source}, evidence=evidence)
        assert target(with_it, Decision(), noisy) == Target("k3", 0.04, "noise")

    def test_another_temperature_than_the_calibrations(self):
        cooler = Rollout(sampling=Sampling(temperature=0.7))
        assert target(budget(), Decision(), cooler) == Target("k3", 0.015)  # a declared limit names no method
        with pytest.raises(
            BudgetInvalidError, match=r"calibrated at temperature 1, and this candidate samples at temperature 0\.7"
        ):
            target(calibrated(), Decision(), cooler)
        with pytest.raises(BudgetInvalidError, match=r"calibrated at top_p 1, .* at top_p 0\.9"):
            target(calibrated(), Decision(), Rollout(sampling=Sampling(top_p=0.9)))
        assert target(calibrated(), Decision(), Rollout(sampling=Sampling(top_k=0))).limit == 0.015

    def test_metric_without_a_limit(self):
        with pytest.raises(BudgetInvalidError, match=r"has no limit for tv(.|\n)*decision.metric: k3"):
            verdict(GOOD, decision=Decision(metric="tv"))


class TestGuards:
    def test_one_nan_token_rejects(self):
        found = verdict(GOOD.model_copy(update={"non_finite_tokens": 1}))
        assert (found.decision, codes(found, "reject")) == ("reject", ["non_finite"])

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_one_prompt_that_is_not_finite_rejects(self, value):
        k3 = [*GOOD.prompt_values["k3"], value]
        found = verdict(GOOD.model_copy(update={"prompt_values": {**GOOD.prompt_values, "k3": k3}}))
        assert (found.decision, codes(found, "reject")) == ("reject", ["non_finite"])

    def test_what_was_not_applied_cannot_be_admitted(self):
        part = Part(part="activations", how="not applied", detail="FP8_DYNAMIC: only weights are simulated")
        found = verdict(GOOD.model_copy(update={"provenance": [part]}))
        assert (found.decision, codes(found, "inconclusive")) == ("inconclusive", ["not_applied"])
        assert verdict(BAD.model_copy(update={"provenance": [part]})).decision == "reject"

    def test_what_was_simulated_is_said(self):
        part = Part(part="weights", how="simulated", detail="FP8_DYNAMIC, round-to-nearest")
        found = verdict(GOOD.model_copy(update={"provenance": [part]}))
        assert found.decision == "admit"
        assert "simulated" in codes(found, "note")

    @pytest.mark.parametrize("upper", [0.02, 0.0017, None])
    def test_an_unbiased_estimate_that_equals_its_lower_bound_is_no_lower_bound(self, upper):
        k3 = summary(0.0017, lower=0.0017, upper=upper, estimator="topk")
        assert verdict(GOOD.model_copy(update={"metrics": {**GOOD.metrics, "k3": k3}})).decision == "admit"

    def test_certain_bound_above_the_limit_does_not_admit(self):
        k3 = summary(0.0017, lower=0.016, upper=None, estimator="topk")
        assert verdict(GOOD.model_copy(update={"metrics": {**GOOD.metrics, "k3": k3}})).decision == "inconclusive"

    def test_rare_huge_prompts_are_not_clipped_away(self):
        values = prompt_means(0.003, 200)
        values[150:152] = [5.0, 5.0]  # after the gate has admitted
        found = verdict(GOOD.model_copy(update={"prompt_values": {**GOOD.prompt_values, "k3": values}}))
        assert found.mean > found.limit
        assert found.decision == "inconclusive"
        assert found.clipped == 2
        assert "clipped" in codes(found, "inconclusive")

    def test_clipping_that_does_not_matter_is_a_note(self):
        values = prompt_means(0.003, 200)
        values[150] = 0.08
        found = verdict(GOOD.model_copy(update={"prompt_values": {**GOOD.prompt_values, "k3": values}}))
        assert (found.decision, codes(found, "note")) == ("admit", ["clipped", "declared"])

    def test_a_reject_with_clipped_prompts_says_what_the_interval_is_of(self):
        found = verdict(measurement(0.2, prompts=8))
        assert (found.decision, codes(found, "inconclusive")) == ("reject", [])
        assert "prompts counted up to" in found.against[0].text

    @pytest.mark.parametrize(
        ("tails", "decision"),
        [
            ({"k3": {"max": 0.139}}, "admit"),
            ({"k3": {"max": 0.138}}, "reject"),
            ({"k3": {"p99": 1, "p99_9": 0.01}}, "reject"),
            ({"abs_dlogp": {"p99_9": 5}}, "admit"),
        ],
    )
    def test_tails(self, tails, decision):
        assert verdict(GOOD, limits(tails=tails)).decision == decision

    def test_a_tail_that_was_not_measured_is_inconclusive(self):
        metrics = {name: value for name, value in GOOD.metrics.items() if name != "k1"}
        found = verdict(GOOD.model_copy(update={"metrics": metrics}), limits(tails={"k1": {"max": 1}}))
        assert found.decision == "inconclusive"

    def test_a_nan_tail_is_above_any_limit(self):
        k3 = GOOD.metrics["k3"].model_copy(update={"max": math.nan})
        measured = GOOD.model_copy(update={"metrics": {**GOOD.metrics, "k3": k3}})
        assert verdict(measured, limits(tails={"k3": {"max": 1e9}})).decision == "reject"

    def test_too_many_clipped_prompts_are_named_as_the_reason(self):
        values = [0.0001] * 256
        values[::60] = [0.08] * 5  # 2 % above 5 limits; mean and interval far below the limit
        found = verdict(GOOD.model_copy(update={"prompt_values": {**GOOD.prompt_values, "k3": values}}))
        assert (found.decision, codes(found, "inconclusive")) == ("inconclusive", ["heavy_tailed"])
        assert found.interval[1] < found.limit
        assert (
            "mean and interval lie below the limit 0.015, but 5 of 256 prompts lie above 5 times the limit, "
            "and with more than 1 % of such prompts" in found.against[0].text
        )

    @pytest.mark.parametrize(("limit", "decision"), [(0.015, "admit"), (0.0018, "inconclusive"), (0.0005, "reject")])
    def test_every_limited_total_is_decided_by_a_gate_of_its_own(self, limit, decision):
        """0.0018 is above the mean 0.0017: a point estimate would admit."""
        found = verdict(GOOD, budget(limits={"total": {"k3": limit, "tv": 0.05}}, floor=None))
        assert (found.metric, found.decision) == ("tv", decision)
        (other,) = [reason for reason in found.reasons if reason.code == "other_total"]
        assert "k3 0.0017 nats/token (95 % interval" in other.text

    def test_another_limited_metric_is_not_overrun(self):
        found = verdict(GOOD, budget(limits={"total": {"k3": 0.0015, "tv": 0.05}}))
        assert (found.metric, found.decision) == ("tv", "inconclusive")
        assert codes(found, "inconclusive") == ["other_total"]
        assert verdict(GOOD, budget(limits={"total": {"k3": 0.015, "tv": 0.05}})).decision == "admit"

    @pytest.mark.parametrize("unmeasured", [{"per_layer": {"model.layers.0": {"k3": 0.01}}}, {"prefix_shift": 0.01}])
    def test_limits_that_cannot_be_measured_are_not_passed_over(self, unmeasured):
        assert verdict(GOOD, limits(**unmeasured)).decision == "inconclusive"


class TestSources:
    LIMITED = limits(per_source={"kv_cache": {"k3": 0.005}})

    def share(self, mean, prompts=64):
        values = prompt_means(mean, prompts)
        return [SourceShare(source="kv_cache", how="simulated", tv=0.01, kl=mean, prompt_values=values, detail="fp8")]

    @pytest.mark.parametrize(
        ("mean", "prompts", "decision"), [(0.001, 64, "admit"), (0.0049, 16, "inconclusive"), (0.012, 64, "reject")]
    )
    def test_each_limited_source_has_its_own_gate(self, mean, prompts, decision):
        measured = GOOD.model_copy(update={"sources": self.share(mean, prompts)})
        assert verdict(measured, self.LIMITED).decision == decision

    def test_not_measured_is_inconclusive(self):
        found = verdict(GOOD, self.LIMITED)
        assert codes(found, "inconclusive") == ["source_unmeasured"]

    def test_not_part_of_the_candidate_is_within(self):
        """A plain KV cache is named among the kernels: it is no source of its own."""
        plain = [Part(part="kernel", how="real", detail="KV cache in bfloat16, CPU_ATTN")]
        assert verdict(measurement(0.0017, prompts=64, provenance=plain), self.LIMITED).decision == "admit"
        assert verdict(measurement(0.0017, prompts=64, provenance=[]), self.LIMITED).decision == "admit"

    def test_limit_on_another_metric_is_inconclusive(self):
        measured = GOOD.model_copy(update={"sources": self.share(0.001)})
        assert verdict(measured, limits(per_source={"kv_cache": {"tv": 0.5}})).decision == "inconclusive"

    @pytest.mark.parametrize(("limit", "decision"), [(0.002, "admit"), (0.001, "reject")])
    def test_the_kernel_is_the_budgets_floor(self, limit, decision):
        assert verdict(GOOD, limits(per_source={"kernel": {"k3": limit}})).decision == decision

    def test_sources_without_limits_decide_nothing(self):
        assert verdict(measurement(0.0017, prompts=64, **sources())).decision == "admit"


class TestWording:
    def test_longer_completions_than_the_calibrations(self):
        assert "longer" not in codes(verdict(GOOD, calibrated()), "note")
        short = calibrated(method={**METHOD, "max_completion_length": 64})
        (note,) = [reason for reason in verdict(GOOD, short).reasons if reason.code == "longer"]
        assert note.text == "completions had up to 128 tokens; the limit was calibrated on at most 64"
        assert note.ok

    def test_observe(self):
        found = verdict(BAD, observe=True)
        assert (found.decision, found.exit_code, found.observed) == ("reject", 0, True)
        assert not verdict(GOOD, observe=True).observed

    def test_declared_is_said_with_its_reason(self):
        (note,) = [reason for reason in verdict(GOOD).reasons if reason.code == "declared"]
        assert "prime-rl's acceptance rule" in note.text
        assert "declared" not in codes(verdict(GOOD, calibrated()), "note")

    def test_forgiven_is_said(self):
        change = Change(field="environment.vllm", stored="0.32.0", found="0.33.0")
        found = verdict(GOOD, accepted=[change])
        assert found.forgiven == [change]
        assert "forgiven by --accept-stale: environment.vllm was 0.32.0, is 0.33.0" in [r.text for r in found.reasons]

    def test_forgiven_without_need_is_said(self):
        change = Change(field="environment.vllm", stored="0.32.0", found="0.32.0")
        assert "not needed" in verdict(GOOD, accepted=[change]).reasons[-1].text


def test_two_calls_agree():
    assert verdict(BAD) == verdict(BAD)
