"""The commands `doctor` and `demo`."""

import argparse
from collections.abc import Sequence

import torch
from tqdm.auto import tqdm  # comes with transformers


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser("liger_compat", description="A lean cross-entropy for Hugging Face language models.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what is wrong with it, how models would be served")
    doctor.add_argument("--models", action="store_true", help="which adapter each model class gets (minutes)")
    demo = commands.add_parser("demo", help="train a small model on real text, unpatched beside patched")
    demo.add_argument("--steps", type=int, default=24, help="training steps (default: %(default)s)")
    demo.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return _doctor(models=options.models)
    return _demo(options.steps, options.device)


def _doctor(*, models: bool) -> int:
    from . import doctor

    for name, state in doctor.environment():
        print(f"{name:<14} {state}")
    found = list(doctor.problems())
    for problem in found:
        print(f"\nPROBLEM: {problem}")
    if not found:
        print("\nNo problem found.")
    if not models:
        print("Which adapter each model class of this transformers would get: python -m liger_compat doctor --models")
        return len(found)
    adapters = {}
    for cls in tqdm(list(doctor.models()), desc="model classes", unit="class"):
        adapters[cls.__name__], why = doctor.adapter_of(cls)
        tqdm.write(f"{cls.__name__:<44} {adapters[cls.__name__]:<14} {why}")
    print(doctor.summary(adapters))
    return len(found)


def _demo(steps: int, device: str) -> int:
    from . import demo
    from .patching import MODES

    print(f"Training a small Llama for {steps} steps on {device}, on English text, with a vocabulary of {demo.VOCABULARY}.")
    with tqdm(total=steps * (1 + len(MODES)), unit="step") as bar:

        def progress(name: str) -> None:
            bar.set_description(name)
            bar.update()

        runs = demo.run_demo(steps, device, progress)
    head = ("", "first loss", "last loss", "gradient norm", "memory of a step")
    print("\n{:<12}{:>12}{:>12}{:>16}{:>18}  outputs.logits after backward()".format(*head))
    for run in runs:
        print(
            f"{run.name:<12}{run.losses[0]:>12.6f}{run.losses[-1]:>12.6f}{run.gradient_norm:>16.6f}"
            f"{run.step_bytes / 2**20:>14.1f} MiB  {run.logits}"
        )
    print()
    for run in runs:
        if run.report is not None:
            print(f"{run.name}: {run.report}\n")
    return 0
