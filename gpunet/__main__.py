"""``python -m gpunet``: the command line."""

from gpunet.cli import main

if __name__ == "__main__":
    main(prog_name="python -m gpunet")
