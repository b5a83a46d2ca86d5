"""The API of game developers: connecting, playing games of all kinds, and misusing it."""

import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.fakes import FakeClock, MemoryLink, chunks, client, episodes
from understudy.client import ClientConfig, Extras, SenderConfig, connect
from understudy.client.connect import (
    Address,
    default_player,
    find_destination,
    spool_tag,
    user_folder,
)
from understudy.core.errors import Closed, ConfigError, InvalidName, Refused, SpecError
from understudy.core.names import player_name
from understudy.experience.frame import FrameKind
from understudy.experience.game import game_spec

SPEC = game_spec("my-game", obs=2, actions=3)


def obs(i: float) -> np.ndarray:
    return np.array([i, -i], np.float32)


# --- Games of all kinds ---------------------------------------------------------------------------


def test_a_real_time_loop_that_decides_every_fourth_frame(tmp_path):
    link = MemoryLink()
    clock = FakeClock()
    game = client(link, tmp_path, clock=clock)
    ep = game.episode(player="anna")
    for frame in range(120):
        if frame % 4 == 0:
            ep.acted(obs(frame), 1, frames=4)
        ep.reward(0.25)
        clock.advance(1 / 60)
        game.pump()
    ep.end(obs(120))
    game.close()
    (frames,) = link.by_session().values()
    (steps,) = episodes(frames)
    assert [(step.obs, step.reward) for step in steps] == [
        ((obs(i * 4).tobytes(),), 1.0) for i in range(30)
    ]
    columns = [chunk.columns for chunk in chunks(frames)]
    is_step = [column["row"] == 0 for column in columns]
    times = np.concatenate(
        [column["t_ms"][at] for column, at in zip(columns, is_step, strict=True)]
    )
    assert abs(np.diff(times.astype(int)) - 4000 / 60).max() <= 1
    assert {
        int(n) for column, at in zip(columns, is_step, strict=True) for n in column["frames"][at]
    } == {4}
    assert len(columns) > 1


def test_a_turn_based_game_of_two(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        for match in range(2):
            seats = [
                game.episode(player=name, seat=seat, match=f"m{match}", opponents=["person"])
                for seat, name in enumerate(("anna", "ben"))
            ]
            for turn in range(9):
                seats[turn % 2].acted(obs(match * 100 + turn), turn % 3)
            seats[0].reward(1.0)
            seats[1].reward(-1.0)
            for seat, ep in enumerate(seats):
                ep.end(obs(99), result="won" if seat == 0 else "lost")
    by_player = {
        str(link.players[session]): frames for session, frames in link.by_session().items()
    }
    assert set(by_player) == {"anna", "ben"}
    anna = episodes(by_player["anna"])
    ben = episodes(by_player["ben"])
    assert ([len(one) for one in anna], [len(one) for one in ben]) == ([5, 5], [4, 4])
    assert (anna[0][-1].reward, ben[0][-1].reward) == (1.0, -1.0)
    assert anna[1][1].obs == (obs(102).tobytes(),)
    notes = [note for chunk in chunks(by_player["ben"]) for note in chunk.meta.episodes]
    assert [(note.match, note.seat, note.result, note.opponents) for note in notes] == [
        ("m0", 1, "lost", ("person",)),
        ("m1", 1, "lost", ("person",)),
    ]


def test_sixteen_players_on_threads_of_one_process(tmp_path):
    link = MemoryLink()
    failures: list[BaseException] = []

    def one_player(game, number):
        try:
            for episode in range(5):
                with game.episode(player=f"p{number}") as ep:
                    for at in range(300):
                        ep.acted(obs(number * 10_000 + episode * 1000 + at), at % 3)
                        ep.reward(float(at))
                    ep.end(obs(-1))
        except BaseException as error:
            failures.append(error)

    config = ClientConfig(link=link, spool=tmp_path, sender=SenderConfig(linger_s=0.02))
    with connect("my-game", obs=2, actions=3, config=config) as game:
        threads = [threading.Thread(target=one_player, args=(game, n)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert game.flush(30)
        assert failures == []
        assert game.stats().recorded_steps == game.stats().acked_steps == 16 * 5 * 300
    assert len(link.by_session()) == 16
    for session, frames in link.by_session().items():
        number = int(link.players[session][1:])
        for episode, steps in enumerate(episodes(frames)):
            expected = [
                (obs(number * 10_000 + episode * 1000 + at).tobytes(),) for at in range(300)
            ]
            assert [step.obs for step in steps] == expected


def test_a_person_and_a_bot_take_turns_at_one_seat(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        ep = game.episode(player="anna", model="my-game/7")
        for at in range(6):
            ep.acted(obs(at), 0, by="bot" if at % 2 else "person")
        ep.end(obs(6))
    (frames,) = link.by_session().values()
    (chunk,) = chunks(frames)
    assert chunk.columns["by"].tolist() == [1, 2, 1, 2, 1, 2, 0]
    assert chunk.meta.episodes[0].model == "my-game/7"


def test_episodes_share_a_session_unless_they_are_open_at_once(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        for _ in range(3):
            ep = game.episode(player="anna")
            ep.acted(obs(0), 0)
            ep.end(obs(1))
        both = [
            game.episode(player="anna"),
            game.episode(player="anna"),
            game.episode(player="anna", seat=1),
        ]
        for ep in both:
            ep.acted(obs(0), 0)
            ep.end(obs(1))
    assert sorted(len(episodes(frames)) for frames in link.by_session().values()) == [1, 1, 4]


def test_consent_is_kept_per_chunk(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path, consent="granted") as game:
        for consent in (None, "denied", "denied", None):
            ep = game.episode(player="anna", consent=consent)
            ep.acted(obs(0), 0)
            ep.end(obs(1))
    (frames,) = link.by_session().values()
    assert [(chunk.meta.consent, chunk.meta.n_steps) for chunk in chunks(frames)] == [
        ("granted", 1),
        ("denied", 2),
        ("granted", 1),
    ]


def test_actions_may_be_given_by_name(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path, actions=["up", "stay", "down"]) as game:
        ep = game.episode(player="anna")
        ep.acted([1, 2], "down")
        ep.end((3.0, 4.0))
    (frames,) = link.by_session().values()
    (chunk,) = chunks(frames)
    assert chunk.columns["action"].tolist() == [2, 0]
    assert chunk.columns["obs"].tolist() == [[1, 2], [3, 4]]


def test_a_players_name_is_in_no_frame(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        for _ in range(3):
            ep = game.episode(player="Anna-Maria Unmistakable")
            for at in range(40):
                ep.acted(obs(at), 0)
            ep.end()
    assert link.frames
    assert not any(b"Unmistakable" in frame.encode() for frame in link.frames)
    assert set(link.players.values()) == {"Anna-Maria Unmistakable"}


def test_without_a_name_the_player_is_random_and_stays_the_same(tmp_path):
    link = MemoryLink()
    for _ in range(2):
        with client(link, tmp_path) as game:
            ep = game.episode()
            ep.acted(obs(0), 0)
            ep.end(obs(1))
    (name,) = set(link.players.values())
    assert name == default_player(tmp_path / "spool")
    assert default_player(tmp_path / "elsewhere") != name


# --- Misuse ---------------------------------------------------------------------------------------

HALF: Any = 1.5
BAD = [
    (lambda ep: ep.acted(np.zeros(3, np.float32), 0), "bad_shape"),
    (lambda ep: ep.acted(np.array([np.nan, 0], np.float32), 0), "not_finite"),
    (lambda ep: ep.acted(obs(1), 3), "not_in_space"),
    (lambda ep: ep.acted(obs(1), "up"), "not_in_space"),
    (lambda ep: ep.acted(obs(1), 0.5), "bad_dtype"),
    (lambda ep: ep.acted(obs(1), 0, action_mask=[True, True, True]), "bad_columns"),
    (lambda ep: ep.acted(obs(1), 0, by="ghost"), "bad_by"),
    (lambda ep: ep.acted("text", 0), "bad_dtype"),
    (lambda ep: ep.acted(obs(1), 0, frames="many"), "bad_input"),
    (lambda ep: ep.acted(obs(1), 0, frames=1.5), "bad_input"),
    (lambda ep: ep.acted(obs(1), 0, frames=-1), "bad_frames"),
    (lambda ep: ep.acted(obs(1), 0, extras=Extras(version=HALF)), "bad_dtype"),
]


@pytest.mark.parametrize(("call", "reason"), BAD)
def test_bad_input_raises_on_the_first_decision(tmp_path, call, reason):
    game = client(MemoryLink(), tmp_path)
    with pytest.raises(Refused) as raised:
        call(game.episode(player="anna"))
    assert raised.value.reason == reason
    game.close()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        *BAD,
        (lambda ep: ep.reward(float("nan")), "not_finite"),
        (lambda ep: ep.reward(None), "bad_dtype"),
    ],
)
def test_bad_input_later_is_counted_warned_once_and_cuts_that_episode(tmp_path, call, reason):
    link = MemoryLink()
    game = client(link, tmp_path)
    for number in range(2):
        ep = game.episode(player="anna")
        for at in range(4):
            ep.acted(obs(at), 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(ep)
        assert len(caught) == (1 if number == 0 else 0)
        ep.acted(obs(9), 0)
        ep.reward(1.0)
        ep.end(obs(10))
    game.close()
    assert game.stats().bad_inputs == 2
    assert game.stats().ignored_calls == 6
    (frames,) = link.by_session().values()
    found = episodes(frames)
    assert [len(steps) for steps in found] in ([3, 3], [4, 4])
    for steps in found:
        assert [step.obs for step in steps] == [(obs(at).tobytes(),) for at in range(len(steps))]
        assert not any(step.terminated for step in steps)


def test_strict_always_raises_and_a_good_call_may_follow(tmp_path):
    link = MemoryLink()
    game = client(link, tmp_path, strict=True)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 0)
    for call, _ in BAD:
        with pytest.raises(Refused):
            call(ep)
    ep.acted(obs(1), 1)
    ep.end(obs(2))
    with pytest.raises(Refused, match="ended"):
        ep.acted(obs(3), 1)
    game.close()
    (frames,) = link.by_session().values()
    assert [step.obs for step in episodes(frames)[0]] == [(obs(0).tobytes(),), (obs(1).tobytes(),)]


def test_an_invalid_action_is_bad_input(tmp_path):
    game = client(MemoryLink(), tmp_path, has_action_mask=True, strict=True)
    ep = game.episode(player="anna")
    ep.acted(obs(0), 1, action_mask=[False, True, False])
    with pytest.raises(Refused, match="invalid_action"):
        ep.acted(obs(1), 0, action_mask=[False, True, False])
    with pytest.raises(Refused, match="bad_shape"):
        ep.acted(obs(1), 0, action_mask=[True, True])
    game.close()


def test_calls_after_the_game_closed_are_quiet_but_counted(tmp_path):
    game = client(MemoryLink(), tmp_path)
    ep = game.episode(player="anna")
    game.close()
    ep.acted(obs(0), 0)
    ep.reward(1.0)
    ep.end()
    assert game.stats().ignored_calls == 3
    assert game.close()
    with pytest.raises(Closed, match="connect again"):
        game.episode(player="anna")


def test_an_episode_without_a_decision_is_not_recorded(tmp_path):
    link = MemoryLink()
    with client(link, tmp_path) as game:
        game.episode(player="anna").end(obs(0))
        with game.episode(player="anna"):
            pass
        with game.episode(player="anna") as ep:
            ep.acted(obs(0), 0)
    assert link.frames == []


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"game": "x"}, ConfigError, "obs="),
        ({"game": "no/slash", "obs": 2, "actions": 2}, InvalidName, "no/slash"),
        ({"game": "x", "obs": 10**7, "actions": 2}, SpecError, "at most"),
        ({"game": "x", "obs": 2, "actions": 2, "consent": "perhaps"}, ConfigError, "granted"),
        ({"game": "x", "obs": 2, "actions": 2, "consnt": "granted"}, TypeError, "consnt"),
        ({"game": "x", "obs": 2, "actions": 2, "data": "d"}, ConfigError, "link"),
        ({"game": SPEC, "obs": 2}, ConfigError, "spec and obs"),
        (
            {"game": SPEC, "actions": 3, "has_action_mask": True},
            ConfigError,
            "actions, has_action_mask",
        ),
        ({"game": SPEC, "has_action_mask": False}, ConfigError, "has_action_mask"),
        ({"game": {"game": "x"}}, ConfigError, "obs= and actions="),
        ({"game": {"game": "x"}, "obs": 2, "actions": 2}, InvalidName, "game name"),
    ],
)
def test_invalid_arguments_are_rejected_at_once(tmp_path, arguments, error, match):
    with pytest.raises(error, match=match):
        connect(**arguments, config=ClientConfig(link=MemoryLink(), spool=tmp_path))


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"lingr_s": 2}, TypeError, "lingr_s"),
        ({"kind": "ghost"}, ConfigError, "player"),
        ({"spool_cap_bytes": 5}, ConfigError, "65536"),
    ],
)
def test_invalid_settings_are_rejected_at_once(settings, error, match):
    with pytest.raises(error, match=match):
        ClientConfig(**settings)


def test_a_config_or_a_folder_of_another_type_is_rejected_at_once():
    number: Any = 3
    with pytest.raises(ConfigError, match="config is '3'; pass a ClientConfig"):
        connect("x", obs=2, actions=2, data="D", config=number)
    with pytest.raises(ConfigError, match="data='3' is not a valid folder"):
        connect("x", obs=2, actions=2, data=number)
    with pytest.raises(InvalidName, match="player name 3 is not allowed"):
        player_name(number)


@pytest.mark.parametrize("has_action_mask", ["x", 1, []])
def test_a_mask_flag_of_another_type_is_rejected_at_once(tmp_path, has_action_mask):
    with pytest.raises(SpecError, match=r"has_action_mask is .*; give True or False"):
        connect("x", obs=2, actions=2, has_action_mask=has_action_mask, data=tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "D"
    with pytest.raises(ConfigError, match=r"cannot write to .*file.*Not a directory"):
        connect("x", obs=2, actions=2, data=below)
    link = MemoryLink()
    with pytest.raises(ConfigError, match="ClientConfig"):
        connect("x", obs=2, actions=2, config=ClientConfig(link=link, spool=below))
    with pytest.raises(ConfigError, match="cannot write to"):
        default_player(below)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_read_only_folder_is_named(tmp_path):
    (tmp_path / "D").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match=r"cannot write to .*Permission denied"):
        connect("x", obs=2, actions=2, data=tmp_path / "D")


def test_times_of_the_sender_must_be_above_0():
    with pytest.raises(ConfigError, match="above 0"):
        SenderConfig(linger_s=-1.0)


def test_connect_has_at_most_ten_parameters():
    assert len(inspect.signature(connect).parameters) <= 10


def test_without_a_place_to_record_to_the_error_lists_the_options(monkeypatch):
    monkeypatch.delenv("UNDERSTUDY_DATA", raising=False)
    with pytest.raises(ConfigError, match="UNDERSTUDY_DATA"):
        connect("x", obs=2, actions=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seat": -1},
        {"match": "m" * 200},
        {"opponents": ["x"] * 65},
        {"opponents": "person"},
        {"opponents": 5},
        {"seed": -1},
        {"consent": "maybe"},
        {"player": ""},
    ],
)
def test_an_episode_with_invalid_notes_is_rejected_and_frees_its_session(tmp_path, wrong):
    game = client(MemoryLink(), tmp_path)
    with pytest.raises((Refused, ConfigError)):
        game.episode(**{"player": "anna", **wrong})
    assert game.stats().open_episodes == 0
    game.close()


def test_an_address_is_an_argument_a_variable_or_the_content_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("uk_file\n")
    monkeypatch.setenv("UNDERSTUDY_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("UNDERSTUDY_KEY_FILE", str(tmp_path / "key"))
    assert find_destination(None, None, None) == Address("http://127.0.0.1:1", "uk_file")
    monkeypatch.setenv("UNDERSTUDY_KEY", "uk_variable")
    assert find_destination(None, None, None) == Address("http://127.0.0.1:1", "uk_variable")
    assert find_destination(None, "http://127.0.0.1:2", "uk_argument") == Address(
        "http://127.0.0.1:2", "uk_argument"
    )
    assert find_destination(tmp_path, None, None) == tmp_path


def test_tags_differ_by_address_game_and_key():
    tags = {spool_tag("a", "g"), spool_tag("b", "g"), spool_tag("a", "h"), spool_tag("a", "g", "k")}
    assert len(tags) == 4
    assert user_folder().name == "understudy"


def test_settings_of_the_config_are_used(tmp_path):
    config = ClientConfig(
        link=MemoryLink(), spool=tmp_path / "here", background=False, clock=FakeClock()
    )
    with connect(game_spec("x", obs=1, actions=2), config=config) as game:
        ep = game.episode(player="anna")
        ep.acted([0.0], 0)
    assert (tmp_path / "here").exists()


def test_a_spec_is_built_from_the_shape_or_used_as_it_is(tmp_path):
    config = ClientConfig(
        link=MemoryLink(), spool=tmp_path, background=False, clock=FakeClock(), kind="actor"
    )
    with connect("my-game", obs=2, actions=3, has_action_mask=True, config=config) as game:
        expected = game_spec("my-game", obs=2, actions=3, has_action_mask=True)
        assert game.spec.to_json() == expected.to_json()
        assert game._config is config
    spec = game_spec("my-game", obs=2, actions=3, max_episode_steps=9)
    with connect(spec, config=config) as game:
        assert game.spec is spec


# --- Processes ------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_cannot_use_its_parents_game(tmp_path):
    script = """
        import os, sys
        sys.path.insert(0, ".")
        from tests.client.fakes import MemoryLink
        from understudy.client import ClientConfig, connect
        from understudy.core.errors import Closed

        def connected(link):
            config = ClientConfig(link=link, spool=sys.argv[1])
            return connect("my-game", obs=2, actions=3, config=config)

        link = MemoryLink()
        game = connected(link)
        ep = game.episode(player="anna")
        ep.acted([0, 0], 0)
        ep.acted([1, 0], 0)
        child = os.fork()
        if child == 0:
            try:
                ep.acted([7, 7], 0)
                game.episode(player="anna")
            except Closed as error:
                assert "fork" in str(error)
                again = connected(MemoryLink())
                other = again.episode(player="anna")
                other.acted([0, 0], 0)
                other.end([1, 1])
                assert again.close()
                sys.exit(7)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ep.end([2, 0])
        assert game.close()
        from tests.client.fakes import chunks
        (frames,) = link.by_session().values()
        print(sum(chunk.meta.n_steps for chunk in chunks(frames)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


def test_leaving_the_program_closes_the_game(tmp_path):
    script = """
        import sys
        sys.path.insert(0, ".")
        import understudy
        from tests.client.fakes import MemoryLink
        from understudy.client import ClientConfig

        class Telling(MemoryLink):
            def close(self):
                print([int(frame.kind) for frame in self.frames])

        def begin():
            config = ClientConfig(link=Telling(), spool=sys.argv[1])
            game = understudy.connect("my-game", obs=2, actions=3, config=config)
            return game.episode(player="anna")

        ep = begin()
        for at in range(5):
            ep.acted([at, 0], 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[0, 2]"), done.stderr


def test_importing_understudy_is_silent_and_light():
    script = (
        "import sys, understudy; assert 'numpy' not in sys.modules; understudy.connect; "
        "understudy.__version__; "
        "print(sorted({'gymnasium', 'jax', 'urllib3', 'cryptography', 'understudy.streams'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.skipif(os.name == "nt", reason="the embedded platform runs on Linux and macOS")
def test_a_data_folder_is_all_a_local_game_needs(tmp_path, monkeypatch):
    from understudy.streams.file import FileStream

    monkeypatch.setenv("UNDERSTUDY_DATA", str(tmp_path))
    with connect("my-game", obs=2, actions=3) as game:
        ep = game.episode(player="anna")
        for at in range(10):
            ep.acted(obs(at), 0)
        ep.end(obs(10))
    stream = FileStream(tmp_path / "stream")
    from understudy.experience.frame import decode_frame

    frames = [
        decode_frame(record.raw)
        for partition in stream.partitions()
        for record in stream.read(partition.id, None, max_bytes=1 << 20, wait_s=0.0).records
    ]
    stream.close()
    assert [frame.kind for frame in frames] == [FrameKind.DATA, FrameKind.CLOSE]
    assert len({frame.player for frame in frames}) == 1
    assert frames[0].player != bytes(16)
    assert (
        tmp_path / "models" / "games" / "my-game" / f"{game.spec.schema}.json"
    ).read_bytes() == game.spec.to_json()


@pytest.mark.parametrize("part", ["stream", "models"])
def test_a_folder_whose_platform_reads_from_elsewhere_is_rejected(tmp_path: Path, part: str):
    used = {"stream.url": "", "store.url": "", "models.url": ""}
    (tmp_path / "backends.json").write_text(
        json.dumps({**used, "store.url": "cassandra://db/games"})
    )
    connect("pong", obs=2, actions=2, data=tmp_path).close()
    (tmp_path / "backends.json").write_text(json.dumps({**used, f"{part}.url": "far://away"}))
    with pytest.raises(
        ConfigError, match=f"has its {part} elsewhere .far://away.*record over HTTP"
    ):
        connect("pong", obs=2, actions=2, data=tmp_path)
    (tmp_path / "backends.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be read .JSONDecodeError.; restore it"):
        connect("pong", obs=2, actions=2, data=tmp_path)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (lambda: ClientConfig(kind="robot"), "kind is 'robot'; use one of player and actor"),
        (
            lambda: connect("g", obs=2, actions=2, data="unused", consent="yes"),
            "consent is 'yes'; use one of granted, denied and unknown",
        ),
        (lambda: SenderConfig(linger_s=0), "linger_s is 0; use seconds above 0"),
        (lambda: SenderConfig(retry_cap_s=None), "retry_cap_s is None; use seconds above 0"),  # type: ignore[arg-type]
        (
            lambda: game_spec("g", obs=2, actions={"m": 3}),  # type: ignore[dict-item]
            "actions['m'] is 3; give a space",
        ),
        (
            lambda: game_spec("g", obs={1: 2}, actions=2),  # type: ignore[dict-item]
            "obs key 1 cannot name a column",
        ),
    ],
)
def test_messages_name_the_setting_and_list_the_choices_in_words(cause, said: str):
    with pytest.raises((ConfigError, SpecError)) as told:
        cause()
    message = str(told.value)
    assert said in message
    assert not any(form in message for form in ("('", "SenderConfig(", "AttributeError"))
