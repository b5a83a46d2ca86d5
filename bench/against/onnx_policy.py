# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""ONNX Runtime: one decision for one observation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from bench.against import payload
from bench.against.link import Link, Round, serve


def model(net: str) -> bytes:
    """The network of that name with the common weights, as an ONNX file."""
    convs, layers = payload.weights(net)
    nodes: list[Any] = []
    constants: list[Any] = []
    at = "obs"

    def add(kind: str, *values: payload.Array, **settings: Any) -> None:
        nonlocal at
        names = [f"{len(constants) + i}" for i in range(len(values))]
        constants.extend(
            numpy_helper.from_array(value, name) for name, value in zip(names, values, strict=True)
        )
        nodes.append(helper.make_node(kind, [at, *names], [f"after_{len(nodes)}"], **settings))
        at = f"after_{len(nodes) - 1}"

    if convs:
        add("Cast", to=TensorProto.FLOAT)
        add("Div", np.float32(255).reshape(1))
    for (kernel, bias), (_, _, side, stride) in zip(convs, payload.NATURE_CONVS, strict=False):
        add("Conv", kernel, bias, kernel_shape=[side, side], strides=[stride, stride])
        add("Relu")
    if convs:
        add("Flatten")
    for number, (kernel, bias) in enumerate(layers):
        add("Gemm", kernel, bias)
        if number + 1 < len(layers):
            add("Relu")
    obs = payload.questions(net)[:1]
    kind = TensorProto.UINT8 if convs else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("obs", kind, list(obs.shape))]
    outputs = [helper.make_tensor_value_info(at, TensorProto.FLOAT, [1, len(layers[-1][1])])]
    graph = helper.make_graph(nodes, "policy", inputs, outputs, constants)
    onnx = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    return bytes(onnx.SerializeToString())


def inference(_: Link, request: dict[str, Any]) -> Round:
    """From a NumPy observation to an action, with as many threads as the harness allows."""

    def make(net: str) -> Callable[[payload.Array], int]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = request["threads"]
        options.inter_op_num_threads = request["threads"]
        session = onnxruntime.InferenceSession(
            model(net), options, providers=["CPUExecutionProvider"]
        )
        return lambda obs: int(session.run(None, {"obs": obs[None]})[0].argmax())

    return payload.inference(make, request)


if __name__ == "__main__":
    serve(["onnxruntime", "onnx", "numpy"], {"inference": inference})
