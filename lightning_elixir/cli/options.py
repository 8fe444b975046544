"""What the command takes. Standard library only."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any

TRAINING_COMMANDS = ("fit", "validate", "test", "predict")
PRECISIONS = ("64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
TIMINGS = ("auto", "after_backward", "behind_forward", "inside_backward")

_PLAN_EXAMPLES = """\
examples:
  lightning-elixir plan --model llama-2-7b --batch-size 4 --seq-len 2048 --checkpointing \\
      --hardware h200 --gpu-memory 24GiB --cpu-memory 256GiB
  lightning-elixir plan --model gpt2 --set n_layer=48 n_embd=1600 n_head=25 --gpu-memory 16GiB --cpu-memory 64GiB
  lightning-elixir plan --fits llama-3.1-8b qwen3-8b --batch-size 1 --seq-len 2048 --checkpointing
  lightning-elixir plan --module train.py:MyModule --init width=4096 --batch train.py:example_batch \\
      --hardware my_machine.json --gpus 4 --html plan.html

exit codes: 0 it fits, 1 it does not, 2 something cannot be used as given
"""


class _Command(argparse.ArgumentParser):
    """Parses what follows the name of a command; an option that it has not is told with the nearest one that it has."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, others = super().parse_known_args(args, namespace)
        unknown = next((word.partition("=")[0] for word in others if word.startswith("--")), None)
        if unknown is not None:
            name, known = unknown.replace("_", "-"), self._option_string_actions
            # What the strategy calls `gpu_memory_limit` is `--gpu-memory` here, not `--cpu-memory-limit`.
            near = [o for o in known if name.startswith(f"{o}-")] or get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "--help has them all"
            self.error(f"there is no option {unknown}; {hint}")
        return found, others


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-elixir",
        description="Train models larger than the GPU's memory with PyTorch Lightning.",
        epilog="`lightning-elixir COMMAND --help` tells more.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Command)
    plan = commands.add_parser(
        "plan",
        help="will a model fit on a machine, with which placement, and how fast: without a GPU",
        description="Whether a model can be trained on a machine, with which placement, and how fast. Needs neither the"
        " machine nor memory for the model: one training step is run on tensors without values.",
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(plan)
    _add_machine(plan)
    _add_training(plan)
    _add_output(plan)
    _add_bench(
        commands.add_parser(
            "bench-hardware",
            help="measure what this machine can do",
            description="Measure transfers, Adam, matrix products and collectives of this machine with this package's"
            " own code. The figures are kept, and used by the strategy. Under torchrun all ranks measure together.",
        )
    )
    _add_consolidate(
        commands.add_parser(
            "consolidate",
            help="one file, or safetensors, out of a sharded checkpoint: without a GPU",
            description="Put a sharded checkpoint (a folder), ours or that of Lightning's FSDP strategies, into a"
            " checkpoint of one file or into safetensors. Tensors pass through memory one by one, or lie in a file on"
            " the output's disk until they are written: so for a .ckpt that disk needs room for it twice.",
        )
    )
    for command, what in (
        ("fit", "train"),
        ("validate", "validate"),
        ("test", "test"),
        ("predict", "predict with"),
    ):
        # Never parsed here: everything after the word is LightningCLI's.
        commands.add_parser(command, add_help=False, help=f"{what} a LightningModule, by Lightning's own command line")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model (one of the first two)")
    group.add_argument(
        "--model",
        metavar="NAME|FILE.json|FOLDER",
        help="a well-known shape (llama-3.1-8b, llama-3.3-70b, qwen2.5-7b, qwen3-8b, qwen3-30b-a3b, mistral-7b,"
        " mixtral-8x7b, gemma-2-9b, gemma-3-27b, phi-4, gpt-oss-20b, deepseek-v3, llama-2-7b, opt-30b, gpt2, and their"
        " other sizes), also as its repository is called (meta-llama/Llama-3.1-8B-Instruct); a model type or a class of"
        " transformers (qwen3, LlamaForCausalLM); the file of a transformers config, or a folder with its config.json."
        " Nothing is downloaded",
    )
    group.add_argument(
        "--module",
        metavar="MODULE:CLASS",
        help="a LightningModule or torch module of your own: package.module:Class or path/to/file.py:Class",
    )
    group.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="change entries of the model's config")
    group.add_argument("--init", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the module's class")
    group.add_argument(
        "--batch",
        metavar="MODULE:FUNCTION",
        help="with --module: a function without arguments that returns one batch; default: the module's"
        " example_input_array stands in for it",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine", "sizes are bytes, or strings such as 24GiB")
    group.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU that may be used")
    group.add_argument(
        "--cpu-memory",
        metavar="SIZE",
        help="host memory that is free, for all GPUs together; a part of it is kept back, as in a fit",
    )
    group.add_argument(
        "--cpu-memory-limit", metavar="SIZE", help="use so much of it, as cpu_memory_limit; nothing is kept back then"
    )
    group.add_argument(
        "--nvme-memory",
        metavar="SIZE",
        help="NVMe space for optimizer states, for all GPUs together, where host memory is short (a fit takes half of"
        " what is free)",
    )
    group.add_argument("--gpus", type=_positive, default=1, metavar="N", help="GPUs of one host; default: 1")
    group.add_argument(
        "--nodes",
        type=_positive,
        default=1,
        metavar="N",
        help="such hosts, each with --gpus and these sizes; default: 1",
    )
    group.add_argument(
        "--sharding",
        choices=("world", "node", "auto"),
        default="auto",
        help="on several hosts, which GPUs share parameters and states: all of them, or those of each; default: auto",
    )
    group.add_argument(
        "--hardware",
        metavar="NAME|FILE.json",
        help="measured figures: h200, or what `bench-hardware --out` wrote; default: round figures of no machine in"
        " particular",
    )
    rates = parser.add_argument_group("single figures of the machine, over those of --hardware")
    for option, what in (
        ("--h2d-gb-s", "host to device, in GB/s"),
        ("--d2h-gb-s", "device to host, in GB/s"),
        ("--collective-gb-s", "all-gather and reduce-scatter, in GB/s of whole chunk"),
        ("--network-gb-s", "what one GPU sends to other hosts while all of its host do, in GB/s"),
        ("--network-us", "time of one message between hosts, in microseconds"),
        ("--gpu-tflops", "matrix products in the precision's dtype, in Tflop/s"),
        ("--gpu-adam", "Adam on the GPU, in Gparam/s"),
        ("--cpu-adam", "Adam of one rank on the host, in Gparam/s"),
        ("--streamed-adam", "Adam on the GPU over states that stream through, in Gparam/s"),
        ("--nvme-read-gb-s", "reading from NVMe, in GB/s"),
        ("--nvme-write-gb-s", "writing to NVMe, in GB/s"),
    ):
        rates.add_argument(option, type=_positive_rate, metavar="X", help=what)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the training")
    group.add_argument("--batch-size", type=_positive, metavar="N", help="with --model: samples of one GPU; default: 8")
    group.add_argument(
        "--seq-len",
        type=_positive,
        metavar="N",
        help="with --model: tokens of a sample; default: 1024, or all the model knows",
    )
    group.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed", help="default: bf16-mixed")
    group.add_argument(
        "--keep-fp32",
        nargs="*",
        metavar="GLOB",
        help="parameters or modules that stay in fp32 beside the default, such as '*.head'; none given: nothing stays;"
        " default: norms with running statistics, and routers",
    )
    group.add_argument(
        "--use-fused-kernels", action="store_true", help="with fused operators, as the strategy's option swaps them in"
    )
    group.add_argument(
        "--ignored",
        nargs="+",
        metavar="GLOB",
        help="parameters or modules that are left out of chunks: they stay on the GPU, and are counted",
    )
    group.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    group.add_argument(
        "--activations",
        nargs="+",
        metavar="WHAT",
        help="what becomes of the activations of the model's blocks: auto, keep, recompute, offload,"
        " recompute_offloaded or keep_attention; or GLOB=WHAT, for blocks by name; instead of --checkpointing",
    )
    group.add_argument("--accumulate", type=_positive, default=1, metavar="N", help="micro-batches of a step")
    group.add_argument(
        "--optimizer",
        choices=("hybrid", "torch"),
        default="hybrid",
        help="HybridAdam or CPUAdam, whose updates may be streamed to the GPU, or Adam of torch.optim; default: hybrid",
    )
    group.add_argument(
        "--averages",
        type=_number,
        default=0,
        metavar="N",
        help="averages of the weights that callbacks keep: how many ElixirWeightAveraging the Trainer has; default: 0",
    )
    group.add_argument(
        "--gradient-clip-val",
        type=_clip_value,
        metavar="X",
        help="gradients are clipped, as the Trainer's option does; 0: they are not",
    )
    group.add_argument(
        "--gradient-clip-algorithm",
        choices=("norm", "value"),
        default="norm",
        help="with --gradient-clip-val; default: norm",
    )
    group.add_argument(
        "--update-timing",
        choices=TIMINGS,
        default="auto",
        help="when updates of states beside the GPU may run; default: auto",
    )
    group.add_argument("--policy", choices=("auto", "cpu", "cuda"), default="auto", help="where chunks may live")
    group.add_argument("--chunk-size", metavar="SIZE", help="bytes of a chunk; default: searched")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--save-plan", metavar="FILE.json", help="for ElixirStrategy(plan=...)")
    group.add_argument("--html", metavar="FILE.html", help="the report, with pictures of memory, chunks and time")
    group.add_argument("--json", action="store_true", help="print everything as JSON instead of tables (not --fits)")
    group.add_argument(
        "--fits",
        nargs="+",
        metavar="NAME",
        help="instead of all this, a table in Markdown: where each of these models (as for --model) would live on GPUs"
        " of 24, 40, 80 and 141 GiB beside 64 and 128 GiB of host memory, with the other options as given",
    )

    group.add_argument(
        "--patterns",
        action="store_true",
        help="with --model, instead of all this, a table in Markdown: parallel patterns of the model's own (experts or"
        " layers that are cut between GPUs) beside sharding alone, by time and memory, and which of them to take",
    )
    group.add_argument(
        "--scaling",
        nargs="+",
        type=_positive,
        metavar="N",
        help="instead of all this, a table in Markdown: what would be chosen on so many hosts, how fast it would be,"
        " and where more hosts stop paying, with the other options as given",
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--refresh", action="store_true", help="measure even if figures were kept")
    parser.add_argument("--nvme-dir", metavar="FOLDER", help="measure this folder's disk as well")
    parser.add_argument("--out", metavar="FILE.json", help="write the figures, for `plan --hardware`")


def _add_consolidate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the checkpoint")
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="FILE.ckpt: all, as Lightning saves it; FILE.safetensors: the weights; a folder: the weights as"
        " transformers lays them out, in several files if need be; default: DIR.consolidated.ckpt",
    )
    parser.add_argument(
        "--max-file-size", metavar="SIZE", default="5GB", help="of one file of weights in a folder; default: 5GB"
    )
    parser.add_argument(
        "--part",
        metavar="NAME",
        default="",
        help="write only the weights below this attribute of the LightningModule, named as the module there names them",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="load whatever objects hyperparameters and callbacks have saved, which can run code",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {value}")
    return value


def _clip_value(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, or 0 for no clipping, got {text}")
    return value


def _positive_rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value
