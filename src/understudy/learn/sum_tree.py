"""A 16-ary sum tree that samples rows in proportion to mass, and the prioritised replay's loops.

A node is always recomputed from its children, in a fixed order, and never adjusted by a difference.
So the tree is a pure function of its leaves: it does not drift, and a tree rebuilt from saved
leaves is bit-identical.

All compiled loops are in this file, because numba's cache detects changes in a loop's own file
only, not in files whose functions it calls. Signatures are explicit, so that one compiled version
accepts columns of any strides, writable or not. Importing this file imports numba, half a second
that uniform replays avoid.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numba
import numba.core.cgutils
import numba.extending
import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.learn.ring import Edit
from understudy.learn.rows import (
    ACTION,
    ALPHA,
    BEFORE,
    COUNT,
    DISCOUNT,
    HIGH,
    LOW,
    NOW,
    PERIOD,
    REACH,
    RETURN,
    STAMP,
    WEIGHT,
    WIDTH,
    Windows,
    aligned_zeros,
    powers,
)

types: Any = numba.types
cgutils: Any = numba.core.cgutils
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(signature: Any) -> Callable[[_Function], _Function]:
    """Compile a function with numba, cached on disk if possible."""

    def compile_(function: _Function) -> _Function:
        options: Any = {"nogil": True, "error_model": "numpy"}
        try:
            machine_code = numba.njit(signature, cache=True, **options)(function)
        except RuntimeError:  # no writable cache: a read-only install and no home folder
            machine_code = numba.njit(signature, **options)(function)
        return cast(_Function, machine_code)

    return compile_


def _column(kind: Any) -> Any:
    """The type of a chunk's column: of any alignment and strides, perhaps read-only."""
    return types.Array(kind, 1, "A", readonly=True, aligned=False)


_f4 = types.float32
_f8 = types.float64
_i4 = types.int32
_i8 = types.int64
_Nodes = _f8[::1]
_Numbers = _i8[::1]
_Facts = _f4[:, ::1]
_Wholes = _i4[:, ::1]
_Bytes = types.uint8[:, ::1]
# Plain tuples: with named tuples a call takes three times as long to start.
_Lines = types.Tuple((_Facts, _Wholes, _Bytes, _Bytes))  # the type of `Lines`
_Tree = types.Tuple((_Nodes, _Nodes, _Numbers))  # the type of `SumTree.parts`


def _code_to_fetch(_: Any, array: Any, index: Any) -> Any:
    """The code that numba emits for a call of `_fetch`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        ir = cgutils.ir
        pointer = ir.IntType(8).as_pointer()
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        at = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        # For reading, with high locality, in the data cache.
        builder.call(prefetch, [at, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(array, types.uint64), emit


_fetch: Any = numba.extending.intrinsic(_code_to_fetch)
"""_fetch(array, index) prefetches a cache line without waiting; the index is into the flat array.

Rows are scattered over arrays larger than the cache, and waiting for them is most of a draw.
"""


# --- The tree -------------------------------------------------------------------------------------


_BELOW = 1 - 2.0**-53
"""Multiplying by this yields the next smaller number."""
_SUMMED = 2
"""From this level on, prefix sums are stored too, so that a search there only compares.

Below it, they would double the cache lines that an update waits for; the levels above fit into the
second-level cache.
"""


@_compiled(_i8(_Tree, _Numbers, _Nodes))
def _set_rows(tree: Any, rows: Any, masses: Any) -> int:
    """Set the masses of rows; returns by how much the number of rows with a mass grew."""
    nodes, sums, begin = tree
    parents = np.empty(len(rows) + 1, np.int64)
    n = 0
    change = 0
    last = -1
    eight = np.uint64(8)
    above = np.uint64(begin[1])
    for i in range(len(rows)):
        row = np.uint64(rows[i])
        parent = rows[i] >> 4
        change += int(masses[i] > 0) - int(nodes[row] > 0)
        nodes[row] = masses[i]
        if parent != last:
            n += 1
            parents[np.uint64(n)] = last = parent
            group = above + np.uint64((parent >> 4) << 4)
            _fetch(nodes, group)
            _fetch(nodes, group + eight)
    for level in range(len(begin) - 1):
        # Rows are mostly sorted, so neighbours share parents and the list shrinks level by level.
        n_parents = 0
        last = -1
        base = np.uint64(begin[level])
        to = np.uint64(begin[level + 1])
        for i in range(1, n + 1):
            parent = parents[np.uint64(i)]
            at = base + np.uint64(parent << 4)
            if level < _SUMMED:
                a = 0.0
                b = 0.0
                c = 0.0
                d = 0.0
                for j in range(0, 16, 4):
                    a += nodes[at + np.uint64(j)]
                    b += nodes[at + np.uint64(j + 1)]
                    c += nodes[at + np.uint64(j + 2)]
                    d += nodes[at + np.uint64(j + 3)]
                total = (a + b) + (c + d)
            else:
                total = 0.0
                summed = at - np.uint64(begin[_SUMMED])
                for j in range(16):
                    total += nodes[at + np.uint64(j)]
                    sums[summed + np.uint64(j)] = total
            nodes[to + np.uint64(parent)] = total
            n_parents += int(parent >> 4 != last)
            parents[np.uint64(n_parents)] = last = parent >> 4
        n = n_parents
    return change


@_compiled(types.Tuple((types.uint64, _f8))(_Nodes, types.uint64, _f8))
def _child(nodes: Any, at: Any, value: Any) -> tuple[Any, Any]:
    """The node, of the 16 from `at` on, at which their sum passes `value`, and the remainder."""
    one = np.uint64(1)
    two = np.uint64(2)
    three = np.uint64(3)
    four = np.uint64(4)
    eight = np.uint64(8)
    b = at + four
    c = at + eight
    # First the group of four, then the node in it, without branches.
    to_b = (nodes[at] + nodes[at + one]) + (nodes[at + two] + nodes[at + three])
    to_c = to_b + ((nodes[b] + nodes[b + one]) + (nodes[b + two] + nodes[b + three]))
    to_d = to_c + ((nodes[c] + nodes[c + one]) + (nodes[c + two] + nodes[c + three]))
    at += (np.uint64(value >= to_b) + np.uint64(value >= to_c) + np.uint64(value >= to_d)) << two
    value -= (
        to_d if value >= to_d else (to_c if value >= to_c else (to_b if value >= to_b else 0.0))
    )
    to_1 = nodes[at]
    to_2 = to_1 + nodes[at + one]
    to_3 = to_2 + nodes[at + two]
    at += np.uint64(value >= to_1) + np.uint64(value >= to_2) + np.uint64(value >= to_3)
    value -= (
        to_3 if value >= to_3 else (to_2 if value >= to_2 else (to_1 if value >= to_1 else 0.0))
    )
    while not nodes[at] > 0:  # rounding went past the end: use the end of the last node with a mass
        at -= one
        value = nodes[at]
    return at, value


@_compiled(types.Tuple((types.uint64, _f8))(_Nodes, types.uint64, _f8))
def _summed_child(sums: Any, at: Any, value: Any) -> tuple[Any, Any]:
    """`_child` for levels with prefix sums."""
    one = np.uint64(1)
    two = np.uint64(2)
    three = np.uint64(3)
    seven = np.uint64(7)
    eleven = np.uint64(11)
    value = min(value, sums[at + np.uint64(15)] * _BELOW)  # keeps rounding from passing the end
    to_b = sums[at + three]
    to_c = sums[at + seven]
    to_d = sums[at + eleven]
    child = (np.uint64(value >= to_b) + np.uint64(value >= to_c) + np.uint64(value >= to_d)) << two
    to_1 = sums[at + child]
    to_2 = sums[at + child + one]
    to_3 = sums[at + child + two]
    child += np.uint64(value >= to_1) + np.uint64(value >= to_2) + np.uint64(value >= to_3)
    return at + child, value - (sums[at + child - one] if child > 0 else 0.0)


@_compiled(types.void(_Tree, _Nodes, _Numbers, _Bytes, _Bytes))
def _descend(tree: Any, remaining: Any, rows: Any, facts: Any, obs: Any) -> None:
    """Find the row where the running sum of masses exceeds each `remaining`, prefetch its data.

    Overwrites `remaining`.
    """
    nodes, sums, begin = tree
    # Unsigned, which avoids checks for negative indices.
    one = np.uint64(1)
    two = np.uint64(2)
    four = np.uint64(4)
    eight = np.uint64(8)
    facts_width = np.uint64(facts.shape[1])
    obs_width = np.uint64(obs.shape[1])
    for i in range(len(rows)):
        rows[i] = 0
    # Level by level over the whole batch, so that loads overlap.
    for level in range(len(begin) - 2, 0, -1):
        base = np.uint64(begin[level])
        below = np.uint64(begin[level - 1])
        for i in range(len(rows)):
            node = np.uint64(rows[i]) << four
            if level < _SUMMED:
                at, remaining[i] = _child(nodes, base + node, remaining[i])
            else:
                at, remaining[i] = _summed_child(
                    sums, base - np.uint64(begin[_SUMMED]) + node, remaining[i]
                )
                at += np.uint64(begin[_SUMMED])
            rows[i] = np.int64(at - base)
            if level < 3:
                group = below + ((at - base) << four)
                _fetch(nodes, group)
                _fetch(nodes, group + eight)
    for i in range(len(rows)):
        at, remaining[i] = _child(nodes, np.uint64(rows[i]) << four, remaining[i])
        rows[i] = np.int64(at)
        _fetch(facts, at * facts_width)
        _fetch(obs, at * obs_width)
        _fetch(obs, (at + two) * obs_width - one)  # the end of the next row


# --- Rows -----------------------------------------------------------------------------------------


_Drawn = types.Tuple((_i8[:, :, ::1], _f4[:, :, ::1], _i4[:, :, ::1]))


@_compiled(types.void(_Tree, _f8[:, ::1], _f4, _Lines, _Drawn))
def _draw(tree: Any, chance: Any, beta: float, lines: Any, drawn: Any) -> None:
    """Draw a row for each number from 0 to 1, stratified over the total, and look up its facts.

    Each batch gets its rows and the rows to bootstrap from as `places`; its weights, returns and
    discounts as `reals`; its actions and stamps as `int_facts`. Overwrites `chance`.
    """
    (facts, ints, raw, obs), (places, reals, int_facts) = lines, drawn
    nodes = tree[0]
    n = chance.shape[1]
    for k in range(len(chance)):
        values = chance[k]
        rows = places[0, k]
        part = nodes[-1] / n
        for i in range(n):
            values[i] = (i + values[i]) * part
        _descend(tree, values, rows, raw, obs)
        smallest = np.inf
        for i in range(n):
            row = np.uint64(rows[i])
            # Importance weights correct for priorities only, not for the weights of chunks.
            values[i] = nodes[row] / facts[row, WEIGHT]
            smallest = min(smallest, values[i])
            following = row + np.uint64(ints[row, REACH] & 0xFFFF)
            places[1, k, i] = np.int64(following)
            reals[1, k, i] = facts[row, RETURN]
            reals[2, k, i] = facts[row, DISCOUNT]
            int_facts[0, k, i] = ints[row, ACTION]
            int_facts[1, k, i] = ints[row, STAMP]
        for i in range(n):  # (n * p)^-beta over the batch's maximum: n and the total cancel
            reals[0, k, i] = np.float32(values[i] / smallest) ** -beta


@_compiled(types.void(_Nodes, _f4, _i8))
def _note(rule: Any, largest: Any, n: int) -> None:
    """Note the largest of n new priorities, for new rows without one."""
    rule[NOW] = max(rule[NOW], largest)
    rule[COUNT] += n
    if rule[COUNT] >= rule[PERIOD]:
        rule[BEFORE] = rule[NOW]
        rule[NOW] = 0.0
        rule[COUNT] = 0.0


@_compiled(
    types.UniTuple(_i8, 2)(_Tree, _Facts, _Wholes, _column(_i8), _column(_i4), _column(_f8), _Nodes)
)
def _feed_back(
    tree: Any, facts: Any, ints: Any, rows: Any, stamps: Any, priorities: Any, rule: Any
) -> tuple[Any, Any]:
    """Set new masses of rows that were not overwritten since they were drawn.

    Returns by how much the number of rows with a mass grew, and the number of invalid priorities.
    """
    nodes = tree[0]
    alpha = np.float32(rule[ALPHA])
    low = np.float32(rule[LOW])
    high = np.float32(rule[HIGH])
    current = np.empty(len(rows), np.int64)
    masses = np.empty(len(rows), np.float64)
    n = 0
    n_bad = 0
    largest = np.float32(0.0)
    for i in range(len(rows)):
        row = rows[i]
        if not (priorities[i] >= 0 and priorities[i] < np.inf):
            n_bad += 1
        elif ints[row, STAMP] == stamps[i] and nodes[row] > 0:
            priority = min(max(np.float32(priorities[i]), low), high)
            current[n] = row
            masses[n] = np.float64(facts[row, WEIGHT]) * priority**alpha
            largest = max(largest, priority)
            n += 1
    _note(rule, largest, n)
    return _set_rows(tree, current[:n], masses[:n]), n_bad


@_compiled(_i8(_Tree, _i8, _column(_f4), _column(_f4), _Nodes))
def _weigh(tree: Any, start: int, weight: Any, priorities: Any, rule: Any) -> int:
    """Set rows from `start` to mass weight * priority^alpha; NaN: the largest priority lately.

    Returns by how much the number of rows with a mass grew.
    """
    alpha = np.float32(rule[ALPHA])
    low = np.float32(rule[LOW])
    high = np.float32(rule[HIGH])
    missing = np.float32(max(rule[BEFORE], rule[NOW]))
    rows = np.empty(len(weight), np.int64)
    masses = np.empty(len(weight), np.float64)
    largest = np.float32(0.0)
    n = 0
    for i in range(len(weight)):
        priority = min(max(priorities[i] if priorities[i] >= 0 else missing, low), high)
        rows[i] = start + i
        masses[i] = np.float64(weight[i]) * priority**alpha
        if priorities[i] >= 0 and weight[i] > 0:
            largest = max(largest, priority)
            n += 1
    _note(rule, largest, n)
    return _set_rows(tree, rows, masses)


_Columns = types.Tuple(
    (
        _column(types.uint8),
        _column(types.boolean),
        _column(types.boolean),
        _column(_f4),
        _column(_f4),
    )
)


@_compiled(_i8(_Columns, _i8, _Nodes, _i8, types.Tuple((_Facts, _Wholes))))
def _windows(columns: Any, first: int, powers: Any, stack: int, out: Any) -> int:
    """Write the windows of a span, as `rows.windows_of` does; returns `n_open`."""
    (row, is_first, terminated, reward, weight), (facts, ints) = columns, out
    n = len(powers) - 1
    last = len(row) - 1
    begin = 0
    n_open = 0
    while begin <= last:
        stop = begin
        while row[stop] == 0 and stop < last:
            stop += 1
        for i in range(begin, stop + 1):
            at = np.uint64(i)
            behind = min(i - begin, stack - 1)
            steps = min(stop - i, n)
            summed = np.float64(reward[at])
            for j in range(1, steps):
                summed += np.float64(reward[at + np.uint64(j)]) * powers[j]
            may_sample = steps > 0 and i >= first and (is_first[begin] or behind == stack - 1)
            facts[at, WEIGHT] = weight[at] if may_sample else np.float32(0.0)
            facts[at, RETURN] = summed
            facts[at, DISCOUNT] = powers[steps]
            ints[at, REACH] = steps | behind << 16
        if stop > begin and terminated[stop - 1]:
            for i in range(max(begin, stop - n), stop):
                facts[i, DISCOUNT] = 0.0
        n_open = stop - begin if row[stop] == 2 else 0
        begin = stop + 1
    return n_open


# --- The tree as a class --------------------------------------------------------------------------


_CHILDREN = 16
"""Children per node: two cache lines of float64."""

Rows = NDArray[np.int64]
Masses = NDArray[np.float64]
Lines = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint8]]
"""All rows' facts as floats, integers and bytes, and an observation column's bytes to prefetch."""


class SumTree:
    """Masses of `capacity` rows, initially 0; `find` and `draw` never return a row of mass 0."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; give at least 1 row")
        sizes = [-(-capacity // _CHILDREN) * _CHILDREN]
        while sizes[-1] > _CHILDREN:
            sizes.append(-(-(sizes[-1] // _CHILDREN) // _CHILDREN) * _CHILDREN)
        # The first node of each level; the last entry is the root.
        self._begin = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._nodes = aligned_zeros((int(self._begin[-1]) + 1,), np.dtype(np.float64))
        self._sums = aligned_zeros((sum(sizes[_SUMMED:]),), np.dtype(np.float64))
        self._n_rows = 0
        self.capacity = capacity
        self.leaves: Masses = self._nodes[:capacity]
        self.parts = self._nodes, self._sums, self._begin  # `_Tree` of the compiled loops

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._nodes[-1])

    def __len__(self) -> int:
        """The number of rows with a mass."""
        return self._n_rows

    def set(self, rows: Rows, masses: Masses) -> None:
        """Set the masses of these rows; if a row occurs twice, its last mass is used."""
        self._n_rows += _set_rows(self.parts, rows, masses)

    def set_range(self, start: int, masses: Masses) -> None:
        """Set the masses of the rows from `start` on."""
        self.set(np.arange(start, start + len(masses)), masses)

    def find(self, values: Masses) -> Rows:
        """The rows at which the running sum of masses passes each value; the total must be > 0."""
        rows = np.empty(values.size, np.int64)
        nothing = np.empty((0, 0), np.uint8)
        _descend(self.parts, values.flatten(), rows, nothing, nothing)
        return rows.reshape(values.shape)

    def draw(self, chance: Masses, *, beta: float, lines: Lines) -> tuple[Array, ...]:
        """Rows for numbers from 0 to 1, [k, batch], with their facts: the fields of `DrawnRows`."""
        places = np.empty((2, *chance.shape), np.int64)
        reals = np.empty((3, *chance.shape), np.float32)
        wholes = np.empty((2, *chance.shape), np.int32)
        _draw(self.parts, chance, beta, lines, (places, reals, wholes))
        return places, *reals, *wholes

    def feed_back(
        self, rows: Rows, *, stamps: Array, priorities: Array, lines: Lines, rule: Array
    ) -> int:
        """Set new masses of drawn rows; returns how many priorities were invalid.

        Rows that were overwritten since they were drawn are ignored.
        """
        more, n_bad = _feed_back(self.parts, *lines[:2], rows, stamps, priorities, rule)
        self._n_rows += more
        return n_bad

    def weigh(self, edit: Edit, *, rule: Array) -> None:
        """Set the masses of an edit's rows; a NaN priority means the largest lately."""
        self._n_rows += _weigh(self.parts, edit.start, edit.weight, edit.priority, rule)


def compiled_windows_of(columns: Mapping[str, Array], lead: int, *, needs: Transitions) -> Windows:
    """`windows_of` in one compiled pass."""
    facts = np.empty((len(columns["row"]), WIDTH), np.float32)
    small = (
        columns["row"],
        columns["is_first"],
        columns["terminated"],
        columns["reward"],
        columns["weight"],
    )
    first = max(0, lead - (needs.n_step - 1))
    discounts = powers(needs.discount, needs.n_step)
    out = (facts, facts.view(np.int32))
    return Windows(facts, _windows(small, first, discounts, needs.stack, out))
