"""Worker: plays for a learner elsewhere; needs NumPy, Gymnasium and the base install, never JAX.

Three threads share a lease. The main one plays, one sends rounds and reads what to do next, and one
waits for new weights. Two rounds may wait for their acks while the next one is played.

A worker imports only the game and the wrappers that its caller names, or a registered Gymnasium id
that the learner names: a learner cannot make it run other code.
"""

import contextlib
import math
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import understudy
from understudy.act.actor import Actor
from understudy.act.evaluate import evaluate
from understudy.act.team import encode_collected
from understudy.act.vector import Envs, game_of, make_envs, wrappers_of
from understudy.client.http import Connection, parse_url
from understudy.core.canonical import canonical_json
from understudy.core.errors import ConfigError, GameFailed, LinkFailed, Refused, UnderstudyError
from understudy.core.settings import load_object
from understudy.core.wording import joined as listed
from understudy.experience.spaces import MAX_NUMBER
from understudy.nn.policy import Policy, decode_policy
from understudy.workers.wire import (
    BINARY,
    KEY_VARIABLE,
    MAX_POLICY_BYTES,
    PROTOCOL,
    ROUNDS_PER_JOIN,
    JoinAnswer,
    JoinRequest,
    Leave,
    Results,
    RoundAnswer,
    RoundHead,
    RunInfo,
    WeightsHead,
    key_in,
    pack,
    read_object,
    unpack,
)

FIRST_WAIT_S = 0.25
MAX_WAIT_S = 3.0
"""A worker whose learner is away tries again after these times, which are drawn at random."""
_POLL_S = 10.0
_POLL_EVERY_S = 0.05
"""The least time between two versions, so that many workers do not occupy the learner."""
_LEARNER_CHECK_S = 2.0
"""How often a worker whose round takes long asks if the run is over; less than `finish` waits."""
_NO_VERSION = 10**15 - 1
_LEAVE_S = 3.0
_CHECK_EVERY_S = 0.1
_REFUSED = ("no_key", "wrong_key", "wrong_scope", "revoked_key", "expired_key")
_OF_PROXY = ("status_502", "status_503", "status_504")
"""Answers of a proxy for a learner that is away."""
_AGAIN = ("join_again", "out_of_order", "no_such_run")
"""Answers after which a worker joins again."""
_MAX_REFUSED = 3
"""Leases in a row that may end because their first round was rejected."""
_ENV_ID = re.compile(r".*-v\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What a worker has done."""

    rounds: int = 0
    """Rounds that the learner has acknowledged."""
    steps: int = 0
    evaluations: int = 0
    """Evaluations that the learner has acknowledged."""
    joins: int = 0
    index: int = -1
    """Its last place in the team."""
    version: int = 0
    """The newest version that it has played."""
    is_over: bool = False
    """The learner said that the run is over."""


class Worker:
    """Joins the run of the learner at `url`, and plays for it until it is over or stopped."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        game: Any = None,
        env_wrapper: Any = (),
        insecure: bool = False,
        on_message: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`key` is by default the variable UNDERSTUDY_WORKER_KEY, or a file's name in
        UNDERSTUDY_WORKER_KEY_FILE.

        `game` is needed only if the learner's is not a registered Gymnasium id: `module:Id-v0`,
        `module:function`, or a function that creates an env. `env_wrapper` is one or more wrappers,
        as classes or import paths, innermost first. `insecure` allows plain HTTP to another
        machine. `on_message` receives what happens, as text for people; another thread may call it,
        and an error that it raises ends `work`.
        """
        self.url = url
        self._insecure = insecure
        self._address()  # an invalid one is reported at once, also without a key
        self._key = _key(key, os.environ)
        self._game = load_game(game) if isinstance(game, str) else game
        is_single = isinstance(env_wrapper, str) or callable(env_wrapper)
        self._wrappers = [env_wrapper] if is_single else list(env_wrapper)
        self._say = on_message
        self._envs: Envs | None = None
        self._tests: Envs | None = None
        self._info: RunInfo | None = None
        self._worked = Worked()
        self._has_joined = False
        self._n_refused = 0
        """Leases, one after the other, whose first round was rejected."""
        self._connect()  # an invalid key is reported at once

    def work(self, stop: threading.Event | None = None) -> Worked:
        """Play until the run is over or `stop` is set; leaves the run then.

        While the learner is away, it tries to join again. ConfigError if the learner refuses this
        worker: its key, its game or its version.
        """
        stop = stop or threading.Event()
        wait_s = FIRST_WAIT_S
        is_away = False
        try:
            while not stop.is_set():
                try:
                    if self._work_once(stop):
                        break
                    wait_s = FIRST_WAIT_S
                    is_away = False
                    continue
                except LinkFailed as error:
                    if error.code == "run_over":
                        self._worked = replace(self._worked, is_over=True)
                        break
                    if not _is_passing(error):
                        raise ConfigError(_explained(error, self.url)) from None
                    if self._has_joined:
                        wait_s = FIRST_WAIT_S
                    if not is_away:
                        self._say_away(error)
                    is_away = True
                stop.wait(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(MAX_WAIT_S, 2 * wait_s)
        finally:
            self._close_envs()
        return self._worked

    def _close_envs(self) -> None:
        for envs in (self._envs, self._tests):
            if envs is not None:
                envs.close()
        self._envs = None
        self._tests = None

    def _say_away(self, error: LinkFailed) -> None:
        is_new = error.code == "unreachable" and not self._worked.joins
        check = "; check the address if it is not starting" if is_new else ""
        self._say(f"{_explained(error, self.url)}{check}; trying again")

    def _connect(self) -> Connection:
        address, host, port, is_tls = self._address()
        return Connection(address, host, port, is_tls=is_tls, key=self._key, timeout_s=10.0)

    def _address(self) -> tuple[str, str, int, bool]:
        address, host, port, is_tls = parse_url(
            self.url,
            insecure=self._insecure,
            how_insecure="the option insecure",
        )
        if urlsplit(self.url).path.strip("/"):
            raise ConfigError(
                f"the learner's address is {self.url[:200]!r}; omit what follows the port, such as "
                f"{self.url.partition('://')[0]}://{host}:{port}"
            )
        return address, host, port, is_tls

    def _work_once(self, stop: threading.Event) -> bool:
        """Join, play and leave; False if the lease ended before."""
        self._has_joined = False
        with contextlib.closing(self._connect()) as link:
            raw = link.request("GET", "/v1/runs")[1]
            with _strange_answers():
                info = read_object(RunInfo, raw)
            envs = self._make_envs(info)
            request = JoinRequest(
                protocol=PROTOCOL,
                understudy=understudy.__version__,
                spec=self._spec.to_json().decode(),
                wrappers=[
                    each if isinstance(each, str) else getattr(each, "__qualname__", repr(each))
                    for each in self._wrappers
                ],
            )
            path = f"/v1/runs/{info.run}"
            raw = link.request(
                "POST",
                f"{path}/join",
                canonical_json(asdict(request)),
                kind="application/json",
                max_bytes=MAX_POLICY_BYTES,
            )[1]
        with _strange_answers():
            text, body = unpack(raw)
            joined = read_object(JoinAnswer, text)
        self._has_joined = True
        self._worked = replace(self._worked, joins=self._worked.joins + 1, index=joined.index)
        try:
            self._say(
                f"joined {info.name} as worker {joined.index} with {joined.num_envs} envs and "
                f"version {joined.version}"
            )
            with _strange_answers():
                policy = decode_policy(body)
            actor = Actor(
                envs,
                self._spec,
                root_seed=joined.root_seed,
                created_ms=joined.created_ms,
                env_index0=joined.first_env,
                incarnation=joined.incarnation,
            )
            return self._work_lease(actor, info, joined, path=path, policy=policy, stop=stop)
        finally:
            with contextlib.suppress(LinkFailed), contextlib.closing(self._connect()) as link:
                link.request(
                    "POST",
                    f"{path}/leave",
                    canonical_json(asdict(Leave(lease=joined.lease))),
                    kind="application/json",
                )

    def _work_lease(
        self,
        actor: Actor,
        info: RunInfo,
        joined: JoinAnswer,
        *,
        path: str,
        policy: Policy,
        stop: threading.Event,
    ) -> bool:
        """Play until the worker is stopped; False if the lease ended before."""
        failure = _Failure()
        with (
            contextlib.closing(
                _Weights(self._connect(), path, joined, policy, failure=failure)
            ) as weights,
            contextlib.closing(
                _Sender(
                    self._connect(),
                    path,
                    joined,
                    stop=stop,
                    on_away=self._say_away,
                    failure=failure,
                )
            ) as sender,
        ):
            try:
                self._play(actor, info, joined, weights=weights, sender=sender, stop=stop)
                sender.flush(_LEAVE_S)
            except LinkFailed as error:
                is_refused = not (_is_passing(error) or error.code in (*_REFUSED, "run_over"))
                self._n_refused = self._n_refused + 1 if is_refused and not sender.n_rounds else 0
                if error.code in _AGAIN or (is_refused and self._n_refused < _MAX_REFUSED):
                    what = _explained(error, self.url) if is_refused else _detail(error)
                    self._say(f"{what}; joining again")
                    return False
                raise
            finally:
                self._worked = replace(
                    self._worked,
                    rounds=self._worked.rounds + sender.n_rounds,
                    steps=self._worked.steps + sender.n_steps,
                    evaluations=self._worked.evaluations + sender.n_evaluations,
                )
        return True

    def _play(
        self,
        actor: Actor,
        info: RunInfo,
        joined: JoinAnswer,
        *,
        weights: "_Weights",
        sender: "_Sender",
        stop: threading.Event,
    ) -> None:
        round_no = joined.incarnation * ROUNDS_PER_JOIN
        evaluated: Sequence[int] = ()
        while not stop.is_set():
            policy = weights.take()
            answer = sender.answer
            if answer.seeds and answer.seeds != evaluated:
                evaluated = answer.seeds
                returns = self._evaluate(policy, info, seeds=evaluated, max_steps=joined.max_steps)
                sender.send_results(policy.version, evaluated, returns)
                continue
            explore = answer.explore
            try:
                collected = actor.collect(
                    policy,
                    joined.steps,
                    round_no=round_no,
                    explore=np.array(explore, np.float32) if isinstance(explore, list) else explore,
                )
            except UnderstudyError:
                raise
            except Exception as error:
                raise GameFailed(
                    f"an env of {info.name} failed: {type(error).__name__}: {error}; fix the env, "
                    "then start the worker again"
                ) from error
            self._worked = replace(self._worked, version=policy.version)
            round_no += 1
            sender.send(encode_collected(collected), collected.env_steps)

    def _evaluate(
        self, policy: Policy, info: RunInfo, *, seeds: Sequence[int], max_steps: int
    ) -> list[float]:
        """The greedy policy's returns; none if the env does not start from given seeds, or if a
        return is not finite.
        """
        try:
            if self._tests is None:
                self._tests = self._created(info, is_training=False)
            evaluated = evaluate(policy, self._tests, seeds=list(seeds), max_steps=max_steps)
        except ConfigError as error:
            self._say(f"this worker cannot evaluate: {error}")
            return []
        returns = [float(value) for value in evaluated.returns]
        if not all(abs(value) <= MAX_NUMBER for value in returns):  # also for NaN
            self._say(f"this worker cannot evaluate: episodes returned {listed(returns)}")
            return []
        return returns

    # --- Envs -------------------------------------------------------------------------------------

    def _make_envs(self, info: RunInfo) -> Envs:
        """The envs of this run; those of the last lease are used again, each reset anew."""
        if self._envs is not None and info == self._info:
            return self._envs
        self._close_envs()
        self._info = info
        self._envs = self._created(info, is_training=True)
        self._spec = game_of(self._envs)
        return self._envs

    def _created(self, info: RunInfo, *, is_training: bool) -> Envs:
        game = info.game if self._game is None else self._game
        missing = [path for path in info.wrappers if not self._wrappers]
        if game is None or (self._game is None and ":" in str(game)) or missing:
            need = [f"game={info.game or 'MODULE:FUNCTION'}"] if self._game is None else []
            need = [] if game is not None and ":" not in str(game) else need
            need += [f"env_wrapper={path}" for path in missing]
            raise ConfigError(
                f"the run's game {info.name} needs modules that this worker does not import by "
                f"itself; add {', '.join(need)}"
            )
        try:
            return make_envs(
                game,
                info.num_envs,
                may_autoreset=is_training,
                env_kwargs=info.env_kwargs,
                wrappers=wrappers_of(self._wrappers, is_training=is_training),
                frame_skip=info.frame_skip,
            )
        except UnderstudyError:
            raise
        except Exception as error:
            raise ConfigError(
                f"envs of {info.name} cannot be created: {type(error).__name__}: {error}; check "
                "the game and the wrappers of this worker"
            ) from error


def load_game(text: str) -> Any:
    """A game by name: a Gymnasium id, or the function at `module:function`."""
    _, colon, name = text.partition(":")
    if not colon or _ENV_ID.fullmatch(name):
        return text
    return load_object(text, what="game")


def _key(key: str | None, environ: Mapping[str, str]) -> str:
    if key is not None and not isinstance(key, str):
        raise ConfigError(
            f"the key is a {type(key).__name__}; pass the text that the learner's machine has in "
            "RUN/worker.key"
        )
    text = (key or key_in(environ)[0]).strip()
    if not text:
        raise ConfigError(
            f"no key was given; pass it or its file, or set {KEY_VARIABLE} to the key or "
            f"{KEY_VARIABLE}_FILE to its file: the learner's machine has it in RUN/worker.key"
        )
    return text


# --- Errors ---------------------------------------------------------------------------------------


def _is_passing(error: LinkFailed) -> bool:
    """Whether the same request may succeed later."""
    if error.code == "unreachable":
        lasting = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
        return not any(reason in str(error) for reason in lasting)
    is_later = error.code in ("not_ready", "busy", "queue_full", "too_many", "too_slow", "internal")
    return error.code in _OF_PROXY or is_later or error.code in _AGAIN


def _detail(error: LinkFailed) -> str:
    return str(error).removeprefix(f"{error.code}: ")


def _explained(error: LinkFailed, url: str) -> str:
    """What went wrong, in one line."""
    if error.code == "unreachable":
        reason = _detail(error).partition(";")[0][:200]
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return (
                f"the certificate of {url} is not trusted here ({reason}); name the "
                "learner's CA in the variable SSL_CERT_FILE, and use the certificate's host name"
            )
        if "WRONG_VERSION_NUMBER" in str(error):
            return f"the learner at {url} does not use TLS; use http://, or give it a certificate"
        hint = ""
        if "closed connection without response" in reason and url.startswith("http://"):
            hint = "; if it never answered: use https:// if it has a certificate"
        return f"the learner at {url} is away ({reason}){hint}"
    if error.code in _OF_PROXY:
        return f"the learner at {url} is away (status {error.code.removeprefix('status_')})"
    if error.code == "not_ready":
        return f"the learner at {url} is starting or stopping"
    if error.code == "strange_answer" or error.code.startswith("status_"):
        return (
            f"{url} does not answer as a learner of understudy {understudy.__version__} "
            f"({error.code}: {_detail(error).partition(';')[0][:200]}); check the address, and "
            "install the same version on both"
        )
    if error.code in _REFUSED:
        return f"the learner at {url} rejects this worker's key: {_detail(error)}"
    return f"the learner at {url} rejects this worker ({error.code}): {_detail(error)}"


@contextlib.contextmanager
def _strange_answers() -> Iterator[None]:
    """Turn what an answer raises that cannot be read into the error of a failed request."""
    try:
        yield
    except Refused as error:
        raise LinkFailed("strange_answer", error.detail) from None


# --- Threads of a lease ---------------------------------------------------------------------------


class _Failure:
    """The first error of a lease's threads, which its main thread raises."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def keep(self, error: Exception) -> None:
        self._error = self._error or error

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class _Weights:
    """Waits for new versions in a thread."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        joined: JoinAnswer,
        policy: Policy,
        *,
        failure: _Failure,
    ) -> None:
        self._connection = connection
        self._failure = failure
        self._path = f"{path}/weights?lease={joined.lease}"
        self._poll_s = min(_POLL_S, joined.lease_s / 3)
        """Also the longest silence of a worker whose rounds wait for the learner."""
        self.policy = policy
        self._is_taken = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def take(self) -> Policy:
        """The newest policy; the next one is requested once this one plays."""
        self._failure.check()
        self._is_taken.set()
        return self.policy

    def _run(self) -> None:
        while not self._is_closed.wait(_POLL_EVERY_S):
            is_taken = self._is_taken.wait(min(_LEARNER_CHECK_S, self._poll_s))
            after = _NO_VERSION
            wait_s = 0.0
            if is_taken:
                self._is_taken.clear()
                after = self.policy.version
                wait_s = self._poll_s
            try:
                status, raw = self._connection.request(
                    "GET",
                    f"{self._path}&after={after}&wait_s={wait_s:g}",
                    wait_s=wait_s,
                    max_bytes=MAX_POLICY_BYTES,
                )
                if status == 200:
                    with _strange_answers():
                        text, body = unpack(raw)
                        self.policy = replace(
                            decode_policy(body), version=read_object(WeightsHead, text).version
                        )
            except Exception as error:
                if not (isinstance(error, LinkFailed) and _is_passing(error)):
                    self._failure.keep(error)
                    return
                # The sender meets the same error, and ends the lease if it lasts.
                self._is_closed.wait(FIRST_WAIT_S)

    def close(self) -> None:
        self._is_closed.set()
        self._is_taken.set()
        self._connection.close()
        self._thread.join(_LEAVE_S)


class _Sender:
    """Sends rounds in order, in a thread, each until it is answered."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        joined: JoinAnswer,
        *,
        stop: threading.Event,
        on_away: Callable[[LinkFailed], None],
        failure: _Failure,
    ) -> None:
        """Once `stop` is set, nothing more is accepted. `on_away` gets the first such error."""
        self._stop = stop
        self._on_away = on_away
        self._connection = connection
        self._path = path
        self._lease = joined.lease
        self._give_up_s = joined.lease_s
        self._number = 0
        self.n_rounds = 0
        self.n_steps = 0
        self.n_evaluations = 0
        self.answer = RoundAnswer(
            task="train", seeds=[], explore=joined.explore, version=joined.version
        )
        self._failure = failure
        self._is_closed = threading.Event()
        self._waiting: queue.Queue[tuple[str, bytes, int] | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def send(self, collected: bytes, n_steps: int) -> None:
        """Send a round once those before it are answered; waits while two are not."""
        head = RoundHead(lease=self._lease, number=self._number)
        self._number += 1
        self._put("chunks", pack(head, collected), n_steps)

    def send_results(self, version: int, seeds: Sequence[int], returns: Sequence[float]) -> None:
        results = Results(
            lease=self._lease, version=version, seeds=list(seeds), returns=list(returns)
        )
        self._put("results", canonical_json(asdict(results)), len(returns))

    def _put(self, route: str, body: bytes, number: int) -> None:
        """`number`: steps of a round, or returns. A round that ends after `stop` is sent, too."""
        is_stopped = False
        while not is_stopped:
            self._failure.check()
            is_stopped = self._stop.is_set()
            with contextlib.suppress(queue.Full):
                timeout_s = _LEAVE_S if is_stopped else _CHECK_EVERY_S
                self._waiting.put((route, body, number), timeout=timeout_s)
                return

    def _run(self) -> None:
        try:
            while (item := self._waiting.get()) is not None:
                route, body, number = item
                self.answer = self._send(route, body)
                if route == "chunks":
                    self.n_rounds += 1
                    self.n_steps += number
                else:
                    self.n_evaluations += bool(number)
        except Exception as error:
            self._failure.keep(error)

    def _send(self, route: str, body: bytes) -> RoundAnswer:
        """The answer to a message, which is sent again while the learner is busy or away."""
        kind = BINARY if route == "chunks" else "application/json"
        path = f"{self._path}/{route}"
        wait_s = FIRST_WAIT_S
        away_s = math.inf
        while True:
            try:
                raw = self._connection.request("POST", path, body, kind=kind, wait_s=60.0)[1]
                with _strange_answers():
                    return read_object(RoundAnswer, raw)
            except LinkFailed as error:
                is_busy = error.code in ("queue_full", "busy", "too_many")
                if not is_busy and (error.code in _AGAIN or not _is_passing(error)):
                    raise
                now_s = time.monotonic()
                if is_busy:
                    away_s = math.inf
                elif away_s == math.inf:
                    away_s = now_s
                    if not self._is_closed.is_set():
                        self._on_away(error)
                elif now_s > away_s + self._give_up_s:
                    raise
                pause_s = min(error.retry_after_s or wait_s, MAX_WAIT_S) * random.uniform(0.5, 1.0)
                if self._is_closed.wait(pause_s):
                    raise
                wait_s = min(MAX_WAIT_S, 2 * wait_s)

    def flush(self, timeout_s: float) -> None:
        """Wait until all rounds are answered, at most for `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        self._failure.check()

    def close(self) -> None:
        self._is_closed.set()
        self._connection.close()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_LEAVE_S)
