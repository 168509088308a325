"""Programs that tests run as the ranks of a job: `mpirun -n 4 python -m tests.distributed_workers.<name>`."""
