"""The play page's inputs, consent, bots and platform connection, run by node without a browser."""

import json
from pathlib import Path

import pytest

from tests.serve.page_modules import page_modules, run
from understudy.experience.game import game_spec
from understudy.training.env_info import GameChoice, inspect_env


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_modules(tmp_path_factory.mktemp("static"))


PAGE = """
globalThis.Element = class extends EventTarget {
  setPointerCapture() {}
  getBoundingClientRect() { return { top: 0, left: 0, width: 100, height: 100 }; }
};
globalThis.document = new EventTarget();
globalThis.window = new EventTarget();
const { Inputs } = await import("./inputs.js");
const { Match } = await import("./match.js");
const rally = await import("./rally.js");
const [canvas, minus, plus] = [new Element(), new Element(), new Element()];
let isOn = true;
const inputs = new Inputs({ canvas, minus, plus, keys: Match.keys, axis: "y", follows: true,
  slack: Match.slack, reach: Match.reach, isOn: () => isOn });
const send = (target, kind, facts) => {
  const event = Object.assign(new Event(kind, { cancelable: true }), facts);
  target.dispatchEvent(event);
  return event.defaultPrevented;
};
const touch = (target, kind, pointerId, clientY, more = {}) =>
  send(target, kind, {
    pointerId, clientX: 0, clientY, button: 0, isPrimary: pointerId === 1, ...more,
  });
const key = (kind, code, more = {}) => send(document, kind, { code, key: code, ...more });
"""
"""A canvas and two buttons without a browser."""


def test_wherever_a_finger_rests_the_paddle_comes_to_rest(modules: Path):
    rested = run(
        modules,
        PAGE
        + """
        const restless = [];
        for (let at = 0; at <= 3072; at++) {
          let court = rally.serve(at);
          touch(canvas, "pointerdown", 1, at / 30.72);
          const moves = [];
          for (let decision = 0; decision < 60; decision++) {
            const move = inputs.take(court.left / rally.HEIGHT);
            moves.push(move);
            for (let frame = 0; frame < rally.FRAMES; frame++) {
              const held = { ...court, x: 2000, y: 1500, speedX: 1, speedY: 0 };
              court = { ...rally.frame(held, move, 0) };
            }
          }
          touch(canvas, "pointerup", 1, 0);
          inputs.take(0.5);
          const wanted = Math.min(2752, Math.max(320, at));
          if (moves.slice(20).some(Boolean) || Math.abs(court.left - wanted) > 90)
            restless.push(at);
        }
        console.log(JSON.stringify(restless));
    """,
    )
    assert rested == []


def test_no_key_stays_held_by_a_modifier_a_blur_or_a_pause(modules: Path):
    got = run(
        modules,
        PAGE
        + """
        const got = [];
        const see = () => got.push(inputs.take(0.5));
        key("keydown", "ArrowUp"); see();
        key("keyup", "ArrowUp", { ctrlKey: true }); see();
        key("keydown", "ArrowDown", { metaKey: true }); see();
        key("keydown", "ArrowDown"); see();
        key("keyup", "MetaLeft", { key: "Meta" }); see();
        key("keydown", "KeyW"); see();
        send(window, "blur", {}); see();
        key("keydown", "KeyS"); see();
        inputs.release(); see();
        const prevented = [
          key("keydown", "ArrowUp"),
          (isOn = false, inputs.release(), key("keydown", "ArrowUp")),
        ];
        see();
        console.log(JSON.stringify({ got, prevented }));
    """,
    )
    assert got["got"] == [-1, 0, 0, 1, 0, -1, 0, 1, 0, 0]
    assert got["prevented"] == [True, False], "arrow keys scroll the page while no game runs"


def test_the_first_finger_on_the_court_counts_and_others_do_not(modules: Path):
    got = run(
        modules,
        PAGE
        + """
        const got = [];
        const see = () => got.push(inputs.take(0.5));
        touch(canvas, "pointerdown", 7, 90, { isPrimary: true, button: 2 }); see();
        touch(canvas, "pointerdown", 1, 90); see();
        touch(canvas, "pointerdown", 2, 10); see();
        touch(canvas, "pointermove", 2, 10); see();
        touch(canvas, "pointerup", 2, 10); see();
        touch(canvas, "pointermove", 1, 20); see();
        touch(canvas, "pointerup", 1, 20); see();
        touch(canvas, "pointerdown", 1, 90); touch(canvas, "pointerup", 1, 90); see(); see();
        touch(plus, "pointerdown", 2, 0); touch(plus, "pointerup", 3, 0); see();
        touch(plus, "pointerup", 2, 0); see();
        console.log(JSON.stringify(got));
    """,
    )
    # A tap that ended before the game read it counts once.
    assert got == [0, 1, 1, 1, 1, -1, 0, 1, 0, 1, 0]


CONSENT = """
globalThis.window = new EventTarget();
const { Consent } = await import("./consent.js");
const items = new Map();
let isFull = false;
const storage = {
  getItem: (name) => items.get(name) ?? null, removeItem: (name) => void items.delete(name),
  setItem: (name, text) => { if (isFull) throw new Error("full"); items.set(name, text); },
};
const heard = [];
const open = (name, key) => {
  const page = new EventTarget();
  const onChange = (isGiven) => heard.push([name, isGiven, [...items.values()]]);
  return { page, consent: new Consent({ key, storage, page, onChange }) };
};
const tell = (to, key) => to.page.dispatchEvent(Object.assign(new Event("storage"), { key }));
const [one, other] = [open("one", "uk_a"), open("other", "uk_a")];
const elsewhere = open("elsewhere", "uk_b");
"""


def test_consent_withdrawn_in_another_tab_takes_effect_at_once(modules: Path):
    got = run(
        modules,
        CONSENT
        + """
        one.consent.set(true);
        tell(other, one.consent.name);
        const between = other.consent.isGiven;
        other.consent.set(false);
        tell(one, other.consent.name);
        tell(elsewhere, other.consent.name);
        items.clear();
        tell(one, null);
        const { isGiven, isOpen } = one.consent;
        console.log(JSON.stringify({ heard, between, is: isGiven, isOpen }));
    """,
    )
    assert got["between"]
    assert [(name, is_given) for name, is_given, _ in got["heard"]] == [
        ("one", True),
        ("other", True),
        ("other", False),
        ("one", False),
        ("one", False),
    ]
    assert (got["is"], got["isOpen"]) == (False, True)


def test_consent_takes_effect_before_it_is_stored_and_a_full_storage_keeps_no_old_yes(
    modules: Path,
):
    got = run(
        modules,
        CONSENT
        + """
        one.consent.set(true);
        isFull = true;
        one.consent.set(false);
        const later = open("later", "uk_a").consent;
        console.log(JSON.stringify({
          heard, is: one.consent.isGiven, later: [later.isGiven, later.isOpen],
        }));
    """,
    )
    assert got["heard"] == [["one", True, []], ["one", False, ["on"]]]
    assert not got["is"]
    assert got["later"] == [False, True]


def test_another_deployment_asks_for_consent_again(modules: Path):
    got = run(
        modules,
        CONSENT
        + """
        one.consent.set(true);
        const [same, another] = [open("same", "uk_a").consent, open("another", "uk_b").consent];
        console.log(JSON.stringify([
          same.isGiven, another.isGiven, another.isOpen, one.consent.name,
        ]));
    """,
    )
    assert got[:3] == [True, False, True]
    assert "uk_a" not in got[3], "the key itself is only in the tab's storage"


def test_a_bot_draws_and_remembers_alike_with_and_without_a_recording(modules: Path):
    got = run(
        modules,
        """
        import { model } from "./opponents.js";
        const looked = [];
        const policy = {
          stack: 3,
          act: (seen, how) => (looked.push([seen.map((one) => one[0]), how]), 2),
          rank: (seen) => seen.map((one) => one[0]),
        };
        const bot = { name: "rally/3", policy };
        const quiet = model(bot);
        for (const x of [1, 2, 3, 4]) quiet.decide({ episode: null, obs: [x] });
        const [told, recorded] = [[], model(bot)];
        const episode = { act: (obs) => (told.push(obs[0]), 1) };
        for (const x of [5, 6]) recorded.decide({ episode, obs: [x] });
        // Consent was withdrawn in the middle of the serve.
        recorded.decide({ episode: null, obs: [7] });
        console.log(JSON.stringify({
          looked, told, ranked: recorded.rank([7]), bot: recorded.bot.name,
        }));
    """,
    )
    drawn = {"deterministic": False}
    assert got["looked"] == [
        [seen, drawn] for seen in ([1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4], [5, 6, 7])
    ]
    assert (got["told"], got["ranked"], got["bot"]) == ([5, 6], [5, 6, 7], "rally/3")


def test_the_bot_of_a_serve_is_chosen_when_the_serve_starts(modules: Path):
    got = run(
        modules,
        """
        import { Match } from "./match.js";
        import { champion } from "./opponents.js";
        let number = 0;
        const acted = [], notes = [];
        const bot = (name) => ({
          name, policy: { stack: 1, act: () => (acted.push(name), 1), rank: () => [] },
        });
        const platform = {
          pickBot: () => bot(`rally/${++number}`), get bot() { return `rally/${number}`; },
        };
        const match = new Match({ opponent: () => champion(platform), record: () => null,
          hear: (event) => event.kind === "opponent" && notes.push(event.name),
          random: () => 0.5 });
        for (let at = 0; at < 100000 && !match.isOver; at++) match.frame({ take: () => 0 });
        const changes = acted.filter((name, at) => name !== acted[at - 1]);
        console.log(JSON.stringify({ notes, changes }));
    """,
    )
    assert len(got["changes"]) >= 7
    assert got["changes"] == got["notes"] == list(dict.fromkeys(got["notes"]))


def test_a_canary_in_the_champions_place_says_that_it_is_on_trial(modules: Path):
    got = run(
        modules,
        """
        import { champion } from "./opponents.js";
        const opponent = (name) =>
          champion({ bot: "rally/1", pickBot: () => (name ? { name, policy: {} } : null) });
        const opponents = ["rally/1", "rally/2", ""].map(opponent);
        console.log(JSON.stringify(opponents.map(({ name, label }) => [name, label])));
    """,
    )
    assert got == [
        ["rally/1", "rally/1"],
        ["rally/2", "rally/2 (on trial)"],
        ["script", "casual script"],
    ]


def test_a_script_replaces_a_bot_that_throws_and_the_match_continues(modules: Path):
    got = run(
        modules,
        """
        import { Match } from "./match.js";
        import { champion } from "./opponents.js";
        const calls = [], said = [];
        let isBroken = true;
        const policy = {
          stack: 1,
          act: () => { if (isBroken) throw new Error("broken"); return 1; },
          rank: () => [],
        };
        const episode = (seat) => ({
          acted: () => {}, reward: () => {}, end: () => calls.push([seat, "end"]),
          act: () => policy.act(), cancel: () => calls.push([seat, "cancel"]),
        });
        const match = new Match({
          opponent: () => champion({ pickBot: () => ({ name: "rally/1", policy }) }),
          record: (seat) => episode(seat), hear: () => {}, random: () => 0.5,
        });
        const first = () => match.points[0] + match.points[1] === 0;
        for (let at = 0; at < 100000 && !match.isOver; at++) {
          try { match.frame({ take: () => 0 }); } catch (error) { said.push(match.recover()); }
          if (!first()) isBroken = false;
        }
        console.log(JSON.stringify({ calls, said, points: match.points, by: match.opponent.by }));
    """,
    )
    assert got["said"] == ["a casual script plays this serve, which is no longer recorded"]
    assert got["calls"][:2] == [[0, "cancel"], [1, "cancel"]]
    assert [call for call in got["calls"][2:] if call[1] != "end"] == []
    assert len(got["calls"]) == 2 + 2 * (sum(got["points"]) - 1)
    assert max(got["points"]) == 7
    assert got["by"] == "bot"


def test_a_model_that_arrives_after_another_was_chosen_does_not_play(modules: Path):
    got = run(
        modules,
        """
        import { Choice } from "./opponents.js";
        const waiting = {};
        const fetched = (number) =>
          new Promise((resolve, reject) => (waiting[number] = { resolve, reject }));
        const choice = new Choice(fetched);
        const give = (number) => waiting[number].resolve({ name: `rally/${number}`, policy: {} });
        const told = [], see = () => told.push(choice.bot?.name ?? "");
        const first = choice.take(1), second = choice.take(2);
        give(2); told.push(await second); see();
        give(1); told.push(await first); see();
        const third = choice.take(3), none = choice.take(0);
        waiting[3].reject(new Error("too late to matter"));
        told.push(await third, await none); see();
        const fourth = choice.take(4);
        waiting[4].reject(new Error("no such model"));
        told.push(await fourth.catch((error) => error.message)); see();
        console.log(JSON.stringify(told));
    """,
    )
    assert got == [True, "rally/2", False, "rally/2", False, True, "", "no such model", ""]


PLATFORM = """
const box = () => {
  const kept = new Map();
  return {
    getItem: (name) => kept.get(name) ?? null,
    setItem: (name, text) => void kept.set(name, text),
    removeItem: (name) => void kept.delete(name),
  };
};
for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(globalThis, name, { value: box(), configurable: true });
globalThis.location = { hash: "", pathname: "/play", origin: "http://127.0.0.1:1" };
globalThis.history = { replaceState: () => (location.hash = "") };
const { Platform, fits, invitation } = await import("./platform.js");
const { sending } = await import("./panel.js");
const { Match } = await import("./match.js");
const { Balance } = await import("./cartpole.js");
"""


def test_a_new_invitation_forgets_the_bot_of_the_old_one(modules: Path):
    got = run(
        modules,
        PLATFORM
        + """
        const invited = (hash) => ((location.hash = hash), invitation());
        const told = ["#game=rally&key=uk_a&bot=3", "", "#game=rally&key=uk_b"].map(invited);
        console.log(JSON.stringify([told, location.hash]));
    """,
    )
    assert got[0] == [
        {"game": "rally", "key": "uk_a", "bot": "3"},
        {"game": "rally", "key": "uk_a", "bot": "3"},
        {"game": "rally", "key": "uk_b", "bot": ""},
    ]
    assert got[1] == ""


def test_a_spec_of_another_game_is_described_in_a_sentence(modules: Path):
    own = [
        json.loads(inspect_env(GameChoice(game=game)).spec.to_json())
        for game in ("rally", "CartPole-v1")
    ]
    other = json.loads(
        game_spec("rally", obs=["a", "b", "c", "d", "e", "f"], actions=["x", "y", "z"]).to_json()
    )
    (modules / "given.json").write_text(json.dumps([*own, other]))
    got = run(
        modules,
        PLATFORM
        + """
        const { readFileSync } = await import("node:fs");
        const given = readFileSync(new URL("given.json", import.meta.url));
        const [rally, cartpole, other] = JSON.parse(given);
        const fitting = [
          [rally, Match], [cartpole, Balance], [other, Match], [cartpole, Match], [null, Match],
        ];
        const asked = [];
        globalThis.fetch = async (address, { signal }) => {
          asked.push([address, signal instanceof AbortSignal]);
          const told = address.endsWith("/rally") ? { schemas: ["s1"], champion: 0 } : other;
          return { ok: true, json: async () => told };
        };
        const platform = new Platform({ game: "rally", key: "uk_a", bot: "" }, Match, () => {});
        await platform.connect();
        const { state } = platform;
        const said = sending(platform, { state, isRecording: true, lost: 0, recordingRate: 1 });
        console.log(JSON.stringify({
          fits: fitting.map(([spec, Play]) => fits(spec, Play)), asked, state, said,
        }));
    """,
    )
    assert got["fits"] == [True, True, False, False, False]
    assert got["asked"] == [["/v1/games/rally", True], ["/v1/games/rally/specs/s1", True]]
    assert got["state"] == "refused"
    assert (
        "observations are a, b, c, d, e, f and its actions x, y, z; this page has ball x"
        in got["said"]
    )


def test_the_state_is_connected_only_if_polls_for_bots_succeed_too(modules: Path):
    got = run(
        modules,
        PLATFORM
        + """
        const platform = new Platform({ game: "rally", key: "uk_a", bot: "" }, Match, () => {});
        const well = {
          recorded: 9, acked: 9, waiting: 0, refused: 0, dropped: 0, recordingRate: 1,
          lastError: "", stopped: "", refusedBots: 0, lastBotError: "",
          lastFollowError: "", badInputs: 0,
        };
        const away = "unreachable: no response";
        const told = [{}, { lastFollowError: away }, { lastError: away, waiting: 3 },
                      { lastError: away }, { stopped: "revoked_key: it was" }, { badInputs: 2 },
                      { lastFollowError: "revoked_key: it was revoked" }].map((more) => {
          platform.game = { stats: () => ({ ...well, ...more }) };
          const { state } = platform;
          const how = { state, isRecording: true, lost: 0, recordingRate: 1 };
          return [state, sending(platform, how)];
        });
        console.log(JSON.stringify(told));
    """,
    )
    assert [state for state, _ in got] == [
        "connected",
        "offline",
        "offline",
        "connected",
        "refused",
        "connected",
        "refused",
    ]
    assert got[0][1] == ""
    assert got[3][1] == "", "an old send error does not count while nothing waits"
    assert got[5][1].startswith("2 inputs did not match")
    assert "it was revoked" in got[6][1]


KEEPER = """
const [heard, signals] = [{}, []];
globalThis.self = { addEventListener: (kind, hear) => (heard[kind] = hear) };
globalThis.location = { origin: "http://127.0.0.1:1" };
globalThis.caches = { open: async () => ({ match: async (pathname) => `kept ${pathname}` }) };
const wait = globalThis.setTimeout;
globalThis.setTimeout = (work, ms) => wait(work, ms / 100);
const timeout = AbortSignal.timeout;
AbortSignal.timeout = (ms) => timeout.call(AbortSignal, ms / 100);
await import("./offline.js");
const ask = (pathname, answer) => new Promise((resolve) => {
  globalThis.fetch = (request, { signal }) => (signals.push(signal), answer(signal));
  const request = { method: "GET", url: location.origin + pathname };
  heard.fetch({ request, respondWith: resolve });
});
"""


def test_a_silent_gateway_times_out_and_a_slow_response_does_not(modules: Path):
    got = run(
        modules,
        KEEPER
        + """
        const silence = (signal) => new Promise((_, reject) =>
          signal.addEventListener("abort", () => reject("away")));
        const told = [await ask("/play", async () => ({ status: 200 }))];
        await new Promise((done) => wait(done, 200));  // its body may take any time
        told.push(
          signals[0].aborted,
          await ask("/play", async () => ({ status: 502 })),
          await ask("/play", silence),
        );
        console.log(JSON.stringify(told));
    """,
    )
    assert got == [{"status": 200}, False, "kept /play", "kept /play"]


def test_while_there_is_no_bot_the_page_says_how_many_steps_the_first_one_needs(modules: Path):
    got = run(
        modules,
        PLATFORM
        + """
        const { whyNoBot } = await import("./panel.js");
        const platform = new Platform({ game: "rally", key: "uk_a", bot: "" }, Match, () => {});
        const said = [whyNoBot(platform)];
        let missing_steps = null, isAway = false;
        globalThis.fetch = async () => {
          if (isAway) throw new TypeError("no answer");
          return { ok: true, json: async () => ({ schemas: [], champion: 0, missing_steps }) };
        };
        const stats = { refusedBots: 0 };
        platform.game = { bot: "", stats: () => stats };
        for (missing_steps of [null, 1211, 1201, 7, 0]) {
          await platform.lookForBot();
          said.push(whyNoBot(platform));
        }
        isAway = true;
        await platform.lookForBot();
        said.push(whyNoBot(platform));
        platform.game.bot = "rally/1";
        await platform.lookForBot();
        said.push(whyNoBot(platform), platform.missingSteps);
        console.log(JSON.stringify(said));
    """,
    )
    needs = "No bot yet: the first one needs about {} more steps of people who agree."
    trained = "No bot yet: the first one is being trained."
    assert got == [
        "",
        "",
        needs.format("1,250"),
        needs.format("1,250"),
        needs.format("50"),
        trained,
        trained,
        "",
        None,
    ]
