"""Bots in a game: the last good one at once and offline, newer ones after all checks."""

import dataclasses
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.act.policies import random_policy
from tests.client.fakes import SEAL, FakeClock, MemoryLink
from tests.client.platforms import SIGNER, SPEC, Platform, constant_policy
from understudy.client.bot import Bots
from understudy.client.connect import ClientConfig, connect
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, LinkFailed
from understudy.core.signed import Signer, public_key_text
from understudy.experience.game import game_spec
from understudy.models.catalogue import Control, live_models

OTHER = Signer(bytes(range(1, 33)))


def bots_of(
    link: MemoryLink, tmp_path, *, clock=None, trust=(), seed=0, has_thread=False, spec=SPEC
) -> Bots:
    return Bots(
        link,
        spec,
        tmp_path / "bots",
        clock=clock or FakeClock(),
        rng=random.Random(seed),
        trust=trust,
        has_thread=has_thread,
    )


def name(bots: Bots) -> str:
    bot = bots.pick()
    return bot.manifest.name if bot else ""


def test_a_bot_that_passes_every_check_plays(tmp_path):
    platform = Platform(tmp_path)
    bots = bots_of(link := MemoryLink(), tmp_path)
    platform.link = link
    assert name(bots) == ""
    assert bots.step() == 1.0  # it did not wait, so we do
    platform.release(constant_policy(2))
    bots.step()
    bot = bots.pick()
    assert bot is not None
    assert bot.manifest.name == "my-game/1"
    assert bot.policy.act([0.0, 0.0]) == 2
    assert (bots.refused_bots, bots.last_error) == (0, "")


def test_the_last_good_bot_plays_at_once_and_offline(tmp_path, bar: Callable[[float], float]):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    platform.release(constant_policy(2))
    before = bots_of(platform.link, tmp_path)
    before.pick()
    before.step()
    platform.link.is_down = True
    began_s = time.process_time()
    bots = bots_of(platform.link, tmp_path)
    assert name(bots) == "my-game/2"
    assert time.process_time() - began_s < bar(0.2)
    assert bots.step() > 0
    assert name(bots) == "my-game/2"
    assert "unreachable" in bots.last_error
    assert len(list((tmp_path / "bots").rglob("*.safetensors"))) == 1


def changed(text: str, **facts) -> str:
    """Return a signed document that was changed after it was signed."""
    document = json.loads(text)
    document["entry"].update(facts)
    return json.dumps(document)


SABOTAGES = {
    "wrong hash": lambda link: link.policies.update({2: link.policies[1]}),
    "truncated": lambda link: link.policies.update({2: link.policies[2][:-1]}),
    "not a policy": lambda link: link.policies.update({2: b"no"}),
    "changed pointer": lambda link: _put(
        link, champion=changed(link.live_models.champion, number=999)
    ),
    "changed release": lambda link: _put(
        link, champion_release=changed(link.live_models.champion_release, epoch=77)
    ),
    "release missing": lambda link: _put(link, champion_release=None),
    "pointer missing": lambda link: _put(link, champion=None),
    "another's pointer": lambda link: _put(link, champion=link.live_models.champion_release),
    "no document": lambda link: _put(link, champion="{"),
    "no object": lambda link: _put(link, champion="[]"),
}


def _put(link: MemoryLink, **facts) -> None:
    assert link.live_models is not None
    link.live_models = dataclasses.replace(link.live_models, **facts)


@pytest.mark.parametrize("how", SABOTAGES)
def test_an_invalid_bot_is_rejected_and_the_last_good_one_stays(tmp_path, how):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    clock = FakeClock()
    bots = bots_of(platform.link, tmp_path, clock=clock)
    bots.pick()
    bots.step()
    platform.release(constant_policy(2))
    SABOTAGES[how](platform.link)
    bots.step()
    assert name(bots) == "my-game/1"
    assert bots.refused_bots == 1
    assert bots.last_error
    assert name(bots_of(platform.link, tmp_path)) == "my-game/1"
    platform.release(constant_policy(0))
    bots.step()
    assert name(bots) == "my-game/3"
    assert bots.last_error == ""


def test_a_bot_that_was_damaged_in_transit_is_checked_again(tmp_path):
    platform = Platform(tmp_path)
    clock = FakeClock()
    platform.release(constant_policy(1))
    good = platform.link.policies[1]
    platform.link.policies[1] = good[:100]
    bots = bots_of(platform.link, tmp_path, clock=clock)
    bots.pick()
    bots.step()
    bots.step()
    assert (name(bots), bots.refused_bots) == ("", 1)
    platform.link.policies[1] = good
    clock.advance(20)
    bots.step()
    assert (name(bots), bots.last_error) == ("my-game/1", "")


def test_an_older_entry_is_rejected_and_a_rollback_is_accepted(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    old = platform.link.live_models
    platform.release(constant_policy(2))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    assert old is not None
    platform.link.live_models = dataclasses.replace(old, number=1000)
    bots.step()
    assert name(bots) == "my-game/2"
    assert "old_bot" in bots.last_error
    fresh = bots_of(platform.link, tmp_path)
    fresh.pick()
    fresh.step()
    assert (name(fresh), "old_bot" in fresh.last_error) == ("my-game/2", True)
    platform.registry.rollback("my-game", why="test")
    platform.announce()
    for one in (bots, fresh):
        one._after = 0
        one.step()
        assert name(one) == "my-game/1"


def test_the_deployments_keys_are_pinned_at_first_contact(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    stranger = Platform(tmp_path / "stranger", signer=OTHER, link=platform.link)
    for _ in range(20):
        stranger.release(constant_policy(2))
    for one in (bots, bots_of(platform.link, tmp_path)):
        one.pick()
        one.step()
        assert name(one) == "my-game/1"
        assert "unknown_key" in one.last_error


def test_trusted_keys_take_precedence_over_those_of_the_platform(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path, trust=[public_key_text(OTHER.public)])
    bots.pick()
    bots.step()
    assert name(bots) == ""
    assert "unknown_key" in bots.last_error
    bots = bots_of(platform.link, tmp_path, trust=[public_key_text(SIGNER.public)])
    bots.pick()
    bots.step()
    assert name(bots) == "my-game/1"
    assert not (tmp_path / "bots" / "trust.json").exists()
    # The bot on disk was signed by a key that is no longer trusted.
    assert name(bots_of(platform.link, tmp_path, trust=[public_key_text(OTHER.public)])) == ""
    with pytest.raises(ConfigError, match="public key"):
        ClientConfig(link=MemoryLink(), spool=tmp_path, trust=("nonsense",))


def test_a_bot_of_another_schema_does_not_play(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path, spec=game_spec("my-game", obs=3, actions=3))
    bots.pick()
    bots.step()
    assert name(bots) == ""
    assert "wrong_schema" in bots.last_error


@pytest.mark.parametrize("what", ["bot.json", "trust.json", "*.safetensors"])
@pytest.mark.parametrize(
    "how", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: b"{}" + raw]
)
def test_a_bot_with_a_damaged_cache_is_fetched_again(tmp_path, what, how):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    (path,) = (tmp_path / "bots").rglob(what)
    path.write_bytes(how(path.read_bytes()))
    again = bots_of(platform.link, tmp_path)
    assert name(again) == ""
    if what == "trust.json":
        path.unlink()
    again.step()
    assert name(again) == "my-game/1"


def test_a_lost_policy_is_fetched_again(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    (path,) = (tmp_path / "bots").rglob("*.safetensors")
    path.unlink()
    again = bots_of(platform.link, tmp_path)
    again.pick()
    again.step()
    assert name(again) == "my-game/1"
    assert path.exists()


def test_a_bot_plays_even_if_it_cannot_be_stored(tmp_path):
    (tmp_path / "bots").write_text("a file where the folder should be")
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    assert name(bots) == "my-game/1"
    assert "cannot be stored" in bots.last_error


def test_the_canary_plays_its_share_of_episodes(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.2)
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    drawn = drawn_by(bots, 5000)
    assert drawn["my-game/2", 0.2] == pytest.approx(1000, abs=100)
    assert drawn["my-game/1", 0.8] == 5000 - drawn["my-game/2", 0.2]
    platform.registry.withdraw("my-game", why="rejected")
    platform.announce()
    bots.step()
    assert drawn_by(bots, 100).keys() == {("my-game/1", None)}


def test_an_invalid_canary_does_not_affect_the_champion(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary")
    platform.link.policies[2] = b"no"
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    assert drawn_by(bots, 200).keys() == {("my-game/1", None)}
    assert (bots.refused_bots, platform.link.n_ticket_requests) == (1, 0)
    assert drawn_by(bots_of(platform.link, tmp_path), 50).keys() == {("my-game/1", None)}


def test_a_cleared_champion_means_no_bot(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    platform.registry.clear_alias("my-game", "champion", schema=SPEC.schema, why="withdrawn")
    platform.announce()
    bots.step()
    assert name(bots) == name(bots_of(platform.link, tmp_path)) == ""


def test_polls_back_off_after_each_failure_and_follow_retry_after(tmp_path):
    class Busy(MemoryLink):
        def bot(self, after, *, wait_s, schema=None):
            raise LinkFailed("too_many", "later", retry_after_s=7.0)

    bots = bots_of(Busy(), tmp_path)
    bots.pick()
    assert 7.0 <= bots.step() <= 30.0


def test_a_game_that_polls_before_it_sends_registers_itself(tmp_path):
    class Unregistered(MemoryLink):
        def bot(self, after, *, wait_s, schema=None):
            if not self.specs:
                raise LinkFailed("not_registered", "who?")
            return super().bot(after, wait_s=wait_s, schema=schema)

    platform = Platform(tmp_path, link=Unregistered())
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    bots.step()
    assert name(bots) == "my-game/1"


def test_no_thread_runs_before_the_first_decision_and_none_after_closing(tmp_path):
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "understudy-bots-my-game"]

    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    config = ClientConfig(link=platform.link, spool=tmp_path / "spool")
    with connect("my-game", obs=2, actions=3, config=config) as game:
        ep = game.episode(player="ada")
        assert threads() == []
        ep.act([0, 0])
        assert len(threads()) == 1
        deadline_s = time.monotonic() + 60
        while game.stats().bot == "" and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert game.stats().bot == "my-game/1"
        ep.end()
    assert threads() == []
    assert ep.act([0, 0]) in (0, 1, 2)
    assert threads() == []


@pytest.mark.parametrize("background", [True, False])
def test_a_program_can_wait_for_its_bot(tmp_path, background):
    platform = Platform(tmp_path)
    config = ClientConfig(link=platform.link, spool=tmp_path / "spool", background=background)
    game = connect("my-game", obs=2, actions=3, config=config)
    assert not game.wait_for_bot(0.05)
    platform.release(constant_policy(1))
    assert game.wait_for_bot(10)
    assert game.episode(player="ada").act([0, 0]) == 1
    game.close()
    began_s = time.monotonic()
    assert game.wait_for_bot(10)
    assert time.monotonic() - began_s < 5


def test_games_without_threads_pump_their_bots(tmp_path):
    platform = Platform(tmp_path)
    clock = FakeClock()
    platform.release(constant_policy(1))
    config = ClientConfig(
        link=platform.link, spool=tmp_path / "spool", background=False, clock=clock
    )
    game = connect("my-game", obs=2, actions=3, config=config)
    game.pump()
    assert platform.link.n_polls == 0
    with game.episode(player="ada") as ep:
        ep.act([0, 0])
        assert game.pump() <= 1.0
        assert game.stats().bot == "my-game/1"
        game.pump()
        assert platform.link.n_polls == 1
        clock.advance(1.5)
        game.pump()
        assert platform.link.n_polls == 2
    game.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_keeps_playing_with_its_loaded_bots(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(2))
    config = ClientConfig(link=platform.link, spool=tmp_path / "spool", background=False)
    game = connect("my-game", obs=2, actions=3, config=config)
    ep = game.episode(player="ada")
    ep.act([0, 0])
    game.pump()
    second = game.episode(player="bob")
    child = os.fork()
    if child == 0:
        os._exit(second.act([0, 0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    ep.end()
    game.close()


def test_two_versions_of_a_game_keep_their_bots_apart_in_one_folder(tmp_path):
    """Entries of one version may be older than those which the other has seen."""
    updated = game_spec("my-game", obs=3, actions=["up", "stay", "down"])
    platform = Platform(tmp_path)
    platform.release(random_policy(updated, "categorical"))
    platform.release(constant_policy(1))
    asked = []

    class BySchema(MemoryLink):
        def bot(self, after, *, wait_s, schema=None):
            asked.append(schema)
            now = platform.registry.catalogue("my-game")
            return live_models(now, *now.pointers(schema), trust=platform.trust)

    link = BySchema()
    link.policies = platform.link.policies
    for spec, wanted in ((SPEC, "my-game/2"), (updated, "my-game/1")):
        bots = bots_of(link, tmp_path, spec=spec)
        assert name(bots) == ""
        bots.step()
        assert (name(bots), bots.refused_bots, asked[-1]) == (wanted, 0, spec.schema)
    link.is_down = True
    for spec, wanted in ((SPEC, "my-game/2"), (updated, "my-game/1")):
        assert name(bots_of(link, tmp_path, spec=spec)) == wanted
    assert len(list((tmp_path / "bots").rglob("trust.json"))) == 1, "the keys are pinned once"


def test_a_bot_is_drawn_by_a_ticket_with_its_propensity(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    assert bots.draw()[1] is None, "there is only one"
    platform.release(constant_policy(2), "canary", share=0.25)
    bots.step()
    assert drawn_by(bots, 99).keys() == {("my-game/1", 0.75), ("my-game/2", 0.25)}


def drawn_by(bots, count):
    """How often each bot was drawn, by name and the probability in its ticket."""
    drawn: Counter[tuple[str, float | None]] = Counter()
    for _ in range(count):
        bot, text = bots.draw()
        propensity = None
        if text is not None:
            ticket = SEAL.open(text, game=bots.spec.game, schema=bots.spec.schema)
            assert bot.manifest.model_no == ticket.model_no
            propensity = ticket.propensity
        drawn[bot.manifest.name, propensity] += 1
        bots.fetch_tickets()
    return drawn


def during_a_trial(tmp_path):
    """A platform with champion, canary and control, and the bots of a client that has all three."""
    platform = Platform(tmp_path)
    platform.release(constant_policy(0))
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.25, control=Control(1, 0.05))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    return platform, bots


def test_beside_a_canary_the_control_plays_its_share_also_after_a_restart(tmp_path):
    platform, bots = during_a_trial(tmp_path)
    for playing in (bots, bots_of(platform.link, tmp_path)):
        playing.pick()
        playing.fetch_tickets()
        drawn = drawn_by(playing, 8_000)
        assert drawn.keys() == {
            ("my-game/1", 0.4),
            ("my-game/2", 0.75),
            ("my-game/3", 0.25),
            ("my-game/3", 0.6),
        }
        assert drawn["my-game/1", 0.4] == pytest.approx(400, abs=80)
        assert drawn["my-game/3", 0.6] == pytest.approx(600, abs=100)
        assert drawn["my-game/3", 0.25] == pytest.approx(7_000 / 4, abs=150)


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize(
    ("damaged", "left"),
    [
        ("control", {("my-game/2", 0.75), ("my-game/3", 0.25)}),
        ("canary", {("my-game/2", None)}),
    ],
)
def test_a_canary_or_control_that_is_damaged_on_disk_leaves_the_others_and_is_fetched_again(
    tmp_path, how, damaged, left
):
    platform, bots = during_a_trial(tmp_path)
    whole = drawn_by(bots, 999).keys()
    live = bots._live
    assert live is not None
    sha256 = getattr(live, damaged).manifest.policy_sha256
    (path,) = (tmp_path / "bots").rglob(f"{sha256}.safetensors")
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(b"no")
    again = bots_of(platform.link, tmp_path)
    again.pick()
    again.fetch_tickets()
    assert drawn_by(again, 999).keys() == left
    assert again.refused_bots == 1
    again.step()
    for playing in (again, bots_of(platform.link, tmp_path)):
        playing.pick()
        playing.fetch_tickets()
        assert drawn_by(playing, 999).keys() == whole


def test_a_control_that_cannot_be_fetched_does_not_delay_champion_and_canary(tmp_path):
    class Partial(MemoryLink):
        def policy(self, model_no):
            if model_no == 1:
                raise LinkFailed("failed", "no response")
            return super().policy(model_no)

    platform = Platform(tmp_path, link=Partial())
    platform.release(constant_policy(0))
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.25, control=Control(1, 0.05))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    assert drawn_by(bots, 99).keys() == {("my-game/2", 0.75), ("my-game/3", 0.25)}


def test_a_control_that_fails_a_check_does_not_affect_champion_and_canary(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(0))
    platform.release(constant_policy(1))
    platform.link.policies[1] = b"no"
    platform.release(constant_policy(2), "canary", share=0.25, control=Control(1, 0.05))
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    assert drawn_by(bots, 99).keys() == {("my-game/2", 0.75), ("my-game/3", 0.25)}
    assert bots.refused_bots == 1
    live = platform.link.live_models
    assert live is not None
    platform.link.live_models = dataclasses.replace(
        live, number=live.number + 1, control_release=live.champion_release
    )
    bots.step()
    assert drawn_by(bots, 99).keys() == {("my-game/2", 0.75), ("my-game/3", 0.25)}
    assert "the control is model 1" in bots.last_error


# --- Tickets --------------------------------------------------------------------------------------


def trial_of_two(tmp_path, **settings):
    """A champion, a canary that plays half of the episodes, and a client that knows both."""
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.5)
    bots = bots_of(platform.link, tmp_path, **settings)
    bots.pick()
    return platform, bots


def test_without_tickets_the_champion_plays_and_is_not_compared(tmp_path):
    platform, bots = trial_of_two(tmp_path)
    bots.step()
    platform.link.is_down = True
    drawn = drawn_by(bots, 200)
    assert drawn["my-game/1", None] == 200 - 64, "as many were fetched before"
    offline = bots_of(platform.link, tmp_path)
    assert drawn_by(offline, 50).keys() == {("my-game/1", None)}
    assert offline._live is not None
    assert offline._live.canary is not None


def test_tickets_are_fetched_in_advance_when_half_are_used_and_dropped_with_their_entry(tmp_path):
    platform, bots = trial_of_two(tmp_path)
    bots.step()
    link = platform.link
    assert (link.n_ticket_requests, len(bots._tickets.left)) == (1, 64)
    for n_requests, n_draws in ((1, 31), (2, 1), (2, 31), (3, 33)):
        for _ in range(n_draws):
            bots.draw()
        bots.step()
        assert link.n_ticket_requests == n_requests
    entry = bots._tickets.trial[0]
    platform.registry.set_alias("my-game", "canary", 2, why="more", share=0.25)
    platform.announce()
    bots.step()
    assert bots._tickets.trial[0] > entry
    assert len(bots._tickets.left) == 64
    assert drawn_by(bots, 200).keys() == {("my-game/1", 0.75), ("my-game/2", 0.25)}
    platform.registry.withdraw("my-game", why="rejected")
    platform.announce()
    bots.step()
    assert not bots._tickets.left


def test_tickets_of_another_entry_or_of_a_model_that_is_not_known_are_not_used(tmp_path):
    platform, bots = trial_of_two(tmp_path)
    trial = platform.link.trial
    assert trial is not None
    for wrong in (
        {"entry": trial.entry + 1},
        {"champion": 7},
        {"canary": 7},
        {"champion": 7, "share": 1.0},  # it is not drawn, but could have been
        {"canary": 7, "share": 0.0},
    ):
        platform.link.trial = dataclasses.replace(trial, **wrong)
        bots._clock.advance(60)
        bots.step()
        assert bots.draw()[1] is None
    platform.link.trial = trial
    bots._clock.advance(60)
    bots.step()
    assert bots.draw()[1] is not None


@pytest.mark.parametrize("alias", ["champion", "canary"])
def test_tickets_of_earlier_models_are_not_used_until_they_are_dropped(tmp_path, alias):
    platform, bots = trial_of_two(tmp_path)
    bots.step()
    platform.release(constant_policy(0), alias, share=0.5)
    update = platform.link.live_models
    assert update is not None
    bots._accept(update)
    champion = "my-game/3" if alias == "champion" else "my-game/1"
    for _ in range(64):
        bot, ticket = bots.draw()
        assert bot is not None
        assert (bot.manifest.name, ticket) == (champion, None)
    bots.fetch_tickets()
    assert {ticket is not None for _, ticket in (bots.draw() for _ in range(30))} == {True}


def test_tickets_that_arrive_after_a_change_of_models_are_not_used(tmp_path):
    class Changing(MemoryLink):
        def tickets(self, n, *, schema, with_control=True):
            batch = super().tickets(n, schema=schema, with_control=with_control)
            if self.n_ticket_requests == 1:
                platform.release(constant_policy(0))
                assert self.live_models is not None
                bots._accept(self.live_models)
            return batch

    platform = Platform(tmp_path, link=Changing())
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.5)
    bots = bots_of(platform.link, tmp_path)
    bots.pick()
    bots.step()
    assert {bots.draw() for _ in range(64)} == {(bots.pick(), None)}
    bots.step()
    assert bots.draw()[1] is not None


def test_expired_tickets_are_replaced(tmp_path):
    _, bots = trial_of_two(tmp_path)
    bots.step()
    left = set(bots._tickets.left)
    bots._clock.advance(86_401)
    assert bots.draw() == (bots.pick(), None)
    bots.step()
    assert len(bots._tickets.left) == 64
    assert not left & set(bots._tickets.left)


def test_a_gateway_without_tickets_is_asked_rarely_and_bots_still_play(tmp_path):
    class Older(MemoryLink):
        def tickets(self, n, *, schema, with_control=True):
            self.n_ticket_requests += 1
            raise LinkFailed("not_found", "this path does not exist; see /v1/openapi.json")

    platform = Platform(tmp_path, link=Older())
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.5)
    clock = FakeClock()
    bots = bots_of(platform.link, tmp_path, clock=clock)
    bots.pick()
    for _ in range(1000):
        clock.advance(1)
        bots.step()
    assert 30 < platform.link.n_ticket_requests < 200
    assert bots.draw() == (bots.pick(), None)
    assert bots.last_error == ""


def test_a_bot_is_drawn_at_once_while_the_gateway_stalls(tmp_path):
    asked = threading.Event()
    answers = threading.Event()

    class Stalling(MemoryLink):
        def tickets(self, n, *, schema, with_control=True):
            if self.n_ticket_requests:
                asked.set()
                assert answers.wait(60)
            return super().tickets(n, schema=schema, with_control=with_control)

        def bot(self, after, *, wait_s, schema=None):
            return super().bot(after, wait_s=wait_s, schema=schema) or (answers.wait(60) and None)

    platform = Platform(tmp_path, link=Stalling())
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.5)
    bots = bots_of(platform.link, tmp_path, has_thread=True)
    bots.pick()
    deadline_s = time.monotonic() + 60
    while not bots._tickets.left:
        assert time.monotonic() < deadline_s, "no ticket arrived"
        time.sleep(0.001)
    try:
        drawn = [bots.draw()[1] for _ in range(200)]
        assert asked.wait(60), "more are fetched meanwhile"
        assert not answers.is_set()
        assert [text is not None for text in drawn] == [True] * 64 + [False] * 136
    finally:
        answers.set()
        bots.stop()
        bots.join(60)
    assert not [thread for thread in threading.enumerate() if "my-game" in thread.name]


def test_joining_waits_for_both_threads_within_one_timeout(tmp_path):
    is_over = threading.Event()
    bots = bots_of(MemoryLink(), tmp_path, clock=SystemClock())
    threads = [threading.Thread(target=is_over.wait, args=(60,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    bots._thread, bots._ticket_thread = threads
    began_s = time.monotonic()
    bots.join(1.0)
    # Twice the timeout would be 2 s.
    assert 0.9 < time.monotonic() - began_s < 1.9
    is_over.set()
    bots.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_use_its_parents_tickets(tmp_path):
    platform = Platform(tmp_path)
    platform.release(constant_policy(1))
    platform.release(constant_policy(2), "canary", share=0.5)
    config = ClientConfig(link=platform.link, spool=tmp_path / "spool", background=False)
    with connect("my-game", obs=2, actions=3, config=config) as game:
        assert game.wait_for_bot(60)
        n_left = len(game._bots._tickets.left)
        assert n_left == 64
        child = os.fork()
        if child == 0:
            champion = game._bots.pick()
            draws = [game._bots.draw() for _ in range(n_left)]
            os._exit(0 if champion and draws == [(champion, None)] * n_left else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(game._bots.draw()[1] is not None for _ in range(n_left)), "the parent does"
