import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement import POLICIES, Columns, Demand, place, rows_with_room

BLOCK = 16
DEMAND = Demand(number=1, num_tokens=200, num_choices=1, num_kv_tokens=300, num_blocks_before_tail=12, block_size=BLOCK,
                output_tokens=10)  # fmt: skip
IDLE = dict(
    is_decode=True, is_usable=True, is_reserved=False, num_active=0, max_active=8, active_tokens=0, pool_tokens=1000, num_placed=0,
    step_base_s=0.02, step_slope_s=0.001, waiting_tokens=0, tokens_per_s=1000.0, held_blocks=0,
)  # fmt: skip
LINK_S = 1e-5


def d(**changes):
    return IDLE | changes


def p(**changes):
    return IDLE | {"is_decode": False} | changes


def columns(*workers, block_s=None):
    arrays = {name: np.array([worker[name] for worker in workers]) for name in IDLE}
    return Columns(**arrays, block_s=block_s or (lambda row: np.full(len(workers), LINK_S)))


def placed(*workers, demand=DEMAND, policy="cost", **more):
    return place(demand, columns(*workers, **more), POLICIES[policy])


every_policy = pytest.mark.parametrize("policy", list(POLICIES))


@every_policy
def test_nobody_can_take_it_is_none(policy):
    for worker in (
        p(),
        d(pool_tokens=299),
        d(num_active=8, active_tokens=10),
        d(num_active=1, active_tokens=900),
        d(is_usable=False),
    ):
        assert placed(worker, policy=policy) is None


@every_policy
def test_a_worker_with_nothing_to_do_takes_whatever_fits_into_its_pool(policy):
    assert placed(d(pool_tokens=300), policy=policy).decode_row == 0


@every_policy
def test_equals_take_turns(policy):
    assert placed(d(num_placed=5), d(num_placed=4), policy=policy).decode_row == 1


@pytest.mark.parametrize("policy", ["cost", "least-loaded"])
def test_of_workers_with_equal_prefixes_the_idler_one_is_picked(policy):
    assert placed(d(num_active=4, active_tokens=9), d(num_active=1, active_tokens=9), policy=policy).decode_row == 1


def test_the_holder_of_the_prefix_is_picked_until_its_load_costs_more_than_the_prefix_saves():
    def holder(num_active):
        return d(num_active=num_active, active_tokens=10, max_active=64, held_blocks=12, step_slope_s=0.0001)

    def chosen(num_active):
        return placed(
            holder(num_active), d(step_slope_s=0.0001), p(), demand=DEMAND._replace(output_tokens=100)
        ).decode_row

    assert chosen(0) == chosen(1) == 0
    assert chosen(60) == 1


def test_a_slow_worker_gets_less():
    assert placed(d(step_base_s=0.1), d()).decode_row == 1


def test_those_that_keep_the_slos_come_before_those_that_are_cheaper():
    demand = DEMAND._replace(slo_ttft_s=0.5, output_tokens=1000)
    slow_to_begin = d(waiting_tokens=5000, step_base_s=0.01)  # 5 s of tails before it, but then it is fast
    assert placed(slow_to_begin, d(), demand=demand._replace(slo_ttft_s=float("inf"))).decode_row == 0
    found = placed(slow_to_begin, d(), demand=demand)
    assert found.decode_row == 1
    assert found.keeps_slos
    nobody = placed(slow_to_begin, demand=demand)
    assert nobody.decode_row == 0
    assert not nobody.keeps_slos


def test_below_the_threshold_of_missing_tokens_it_is_computed_where_it_decodes():
    assert placed(d(), p(), demand=DEMAND._replace(local_tokens=192)).is_local
    assert placed(d(held_blocks=11), p(), demand=DEMAND._replace(local_tokens=16)).is_local
    assert not placed(d(held_blocks=10), p(), demand=DEMAND._replace(local_tokens=16), policy="prefix").is_local


@pytest.mark.parametrize("policy", ["cost", "least-loaded", "round-robin"])
def test_where_nobody_computes_prompts_and_nobody_else_has_all_of_it_it_is_computed_where_it_decodes(policy):
    crowded = d(held_blocks=6, num_active=7, active_tokens=700, num_placed=1)
    found = placed(d(held_blocks=5), crowded, policy=policy)
    assert (found.decode_row, found.source_rows, found.is_local, found.decided_by) == (0, (), True, "no source")
    assert found.prediction.computing_s == 7 * BLOCK / 1000


def test_computing_here_is_chosen_when_fetching_would_take_longer_and_nobody_is_held_up():
    busy = p(waiting_tokens=20_000)
    assert placed(d(), busy).is_local
    assert not placed(d(), p()).is_local
    crowded = d(num_active=7, active_tokens=7)
    assert not placed(crowded, p(waiting_tokens=900)).is_local, "seven streams would stand still for it"
    assert placed(d(), busy, policy="prefix").source_rows == (1,), "the other policies do not weigh"


def test_of_computing_here_and_fetching_the_one_that_keeps_the_slos_wins_whatever_it_costs():
    crowded, free = d(num_active=4, active_tokens=4), d(num_active=1, active_tokens=1)
    late, soon = p(waiting_tokens=1500), p(waiting_tokens=10)
    assert not placed(crowded, late).is_local
    in_time = placed(crowded, late, demand=DEMAND._replace(slo_ttft_s=1.0))
    assert in_time.is_local
    assert in_time.keeps_slos
    assert "only computing here" in in_time.decided_by
    assert placed(free, p(waiting_tokens=3000)).is_local
    smooth = placed(free, p(waiting_tokens=3000), demand=DEMAND._replace(slo_tpot_s=0.05))
    assert not smooth.is_local, "computing here would hold up the streams there for longer"
    assert "only fetching" in smooth.decided_by
    for slo_s, what in ((0.01, "fetching costs less"), (9.0, "fetching costs less")):
        assert placed(crowded, soon, demand=DEMAND._replace(slo_ttft_s=slo_s)).decided_by == what


def test_whoever_computes_here_still_knows_the_sources_in_case_the_index_is_wrong():
    found = placed(d(held_blocks=12), p())
    assert found.is_local
    assert found.source_rows == (1,)
    assert found.num_missing_tokens == 0
    assert found.local_tokens == 0


def test_the_source_is_the_one_that_is_done_first():
    assert placed(d(), p(waiting_tokens=500), p(), p(waiting_tokens=100)).source_rows[0] == 2
    assert placed(d(), p(), p(tokens_per_s=9000.0)).source_rows[0] == 2
    links = np.array([0, 0.5, LINK_S])
    assert placed(d(), p(), p(), block_s=lambda row: links).source_rows[0] == 2


def test_what_somebody_holds_is_read_and_not_computed_again():
    found = placed(d(), p(held_blocks=12), p())
    assert found.source_rows[0] in (1, 2)
    assert found.prediction.computing_s == 0


def test_next_sources_differ_from_request_to_request():
    workers = [d(), *(p(waiting_tokens=10 + 100 * k) for k in range(8))]
    found = {placed(*workers, demand=DEMAND._replace(number=number)).source_rows[1:] for number in range(8)}
    assert len(found) >= 7
    assert all(placed(*workers, demand=DEMAND._replace(number=number)).source_rows[0] == 1 for number in range(8))


@every_policy
def test_sources_that_failed_are_left_out(policy):
    demand = DEMAND._replace(failed_rows=frozenset({1, 2}))
    assert placed(d(), p(), p(), p(waiting_tokens=1000), demand=demand, policy=policy).source_rows == (3,)


@every_policy
def test_a_source_whose_pool_cannot_hold_the_chain_is_none(policy):
    assert placed(d(), p(pool_tokens=191), policy=policy).source_rows == ()


@every_policy
def test_a_source_that_is_not_usable_is_none(policy):
    assert placed(d(), p(is_usable=False), policy=policy).source_rows == ()


def test_holders_are_named_when_they_have_more_than_the_source():
    busy_holder = d(num_active=3, active_tokens=9, step_slope_s=0.1, held_blocks=9)
    assert placed(d(), busy_holder, p(), policy="least-loaded").holder_rows == (1,)
    assert placed(d(), busy_holder, p(held_blocks=9), policy="least-loaded").holder_rows == ()


def test_a_decode_worker_that_has_it_all_is_the_first_source_and_whoever_computes_the_second():
    full = d(num_active=8, active_tokens=9, held_blocks=12)
    assert placed(d(), full, p()).source_rows == (1, 2)
    assert placed(d(), full).source_rows == (1,)
    failed = DEMAND._replace(failed_rows=frozenset({1}))
    assert placed(d(), full, p(), demand=failed).source_rows == (2,)
    assert placed(d(), full | {"held_blocks": 11}, p()).source_rows == (2,)


def test_a_suspect_runs_apart_or_waits():
    demand = DEMAND._replace(runs_apart=True)
    assert placed(d(num_active=1, active_tokens=1), demand=demand) is None
    assert placed(d(num_active=1, active_tokens=1), d(), demand=demand).decode_row == 1


def test_whoever_wants_the_prompts_log_probabilities_is_computed_where_it_decodes():
    found = placed(d(), p(), demand=DEMAND._replace(computes_all=True))
    assert found.is_local
    assert found.source_rows == ()


@every_policy
def test_an_explanation_names_the_candidates_and_what_decided(policy):
    found = placed(d(), d(num_active=2, active_tokens=3), p(), demand=DEMAND._replace(explains=True), policy=policy)
    assert {one.row for one in found.candidates} == {0, 1, 2}
    assert found.decided_by
    scores = [one.score for one in found.candidates if one.role == "decode"]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)


def test_predictions_are_what_the_parts_take():
    found = placed(d(), p(waiting_tokens=100), policy="prefix").prediction
    assert found.waiting_s == pytest.approx(0.1)
    assert found.computing_s == pytest.approx(12 * BLOCK / 1000)
    assert found.moving_s == pytest.approx(12 * LINK_S)
    assert found.ttft_s == pytest.approx(0.1 + 12 * BLOCK / 1000 + found.tail_s)


def test_the_way_that_was_not_taken_is_told_with_its_parts():
    fetched, computed = placed(d(), p(waiting_tokens=100)), placed(d(), p(waiting_tokens=20_000))
    assert (fetched.is_local, computed.is_local) == (False, True)
    assert fetched.alternative.computing_s == pytest.approx(12 * BLOCK / 1000)
    assert fetched.alternative.waiting_s == 0
    assert computed.alternative.waiting_s == pytest.approx(20)
    assert placed(d()).alternative is None
    assert placed(d(held_blocks=12), p()).alternative is None, "nothing is missing"


workers = st.lists(
    st.fixed_dictionaries(
        {
            "is_decode": st.booleans(), "is_usable": st.booleans(), "is_reserved": st.booleans(),
            "num_active": st.integers(0, 8), "max_active": st.just(8), "active_tokens": st.integers(0, 900),
            "pool_tokens": st.sampled_from([100, 400, 1000]), "num_placed": st.integers(0, 3),
            "step_base_s": st.sampled_from([0.01, 0.02]), "step_slope_s": st.sampled_from([0.0, 0.001]),
            "waiting_tokens": st.integers(0, 3000), "tokens_per_s": st.sampled_from([500.0, 1000.0]),
            "held_blocks": st.integers(0, 13),
        }
    ),
    min_size=1, max_size=5,
)  # fmt: skip


@given(workers, st.sampled_from([16, 200]), st.sampled_from([0, 64]), st.booleans(), st.sampled_from(list(POLICIES)))
def test_shortcuts_change_no_decision(workers, num_tokens, local_tokens, runs_apart, policy):
    """An explained placement takes none: all candidates are compared."""
    demand = DEMAND._replace(
        num_tokens=num_tokens, num_blocks_before_tail=(num_tokens - 1) // BLOCK, local_tokens=local_tokens,
        runs_apart=runs_apart, slo_ttft_s=1.0,
    )  # fmt: skip
    short, seen = columns(*workers), columns(*workers)
    rows = rows_with_room(short, demand)
    plain = placed(*workers, demand=demand._replace(explains=True), policy=policy)
    found = place(demand, short, POLICIES[policy], rows)
    assert found == (None if plain is None else plain._replace(candidates=()))
    assert found == placed(*workers, demand=demand, policy=policy)
    assert all((getattr(short, name) == getattr(seen, name)).all() for name in IDLE), "and nothing in the columns"


@given(workers, st.booleans(), st.integers(1, 2))
def test_who_has_room_is_as_the_words_say(workers, runs_apart, num_choices):
    demand = DEMAND._replace(runs_apart=runs_apart, num_choices=num_choices)

    def has_room(w):
        fits = w["active_tokens"] + demand.num_tokens * num_choices <= w["pool_tokens"]
        fits = fits and w["num_active"] + num_choices <= w["max_active"]
        is_free = w["num_active"] == 0 if runs_apart else (w["num_active"] == 0 or fits) and not w["is_reserved"]
        return is_free and w["pool_tokens"] >= demand.num_kv_tokens and w["is_decode"] and w["is_usable"]

    wanted = [row for row, worker in enumerate(workers) if has_room(worker)]
    assert rows_with_room(columns(*workers), demand).tolist() == wanted
