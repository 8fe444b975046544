import os, sys, time, re, tempfile, torch, torch.distributed as dist
from lightning_elixir import profile_hardware
from lightning_elixir.core.comm import SoloComm
from lightning_elixir.core.device import make_device
from lightning_elixir.plan.hardware import hardware_table, save_hardware
from lightning_elixir.profiling.rates import Workbench, _update_in
from lightning_elixir.profiling.stopwatch import Stopwatch

def huge():
    text = open("/proc/self/smaps_rollup").read()
    return int(re.search(r"AnonHugePages:\s+(\d+)", text).group(1)) // 1024

def timings(update, n=24):
    out = []
    for _ in range(n):
        t = time.perf_counter(); update.run(); out.append(update.numel / (time.perf_counter() - t) / 1e9)
    return " ".join(f"{x:.2f}" for x in out)

def ranks():
    rank = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for threads in (torch.get_num_threads(), 16):
        torch.set_num_threads(threads)
        d = tempfile.mkdtemp(); t = time.time()
        spec = profile_hardware(local_world_size=2, cache_dir=d)
        s = time.time() - t; t = time.time()
        again = profile_hardware(local_world_size=2, cache_dir="/tmp/cache" if rank else d)
        if rank == 0:
            print("threads", threads, "seconds", s, "cached", time.time() - t, again.h2d == spec.h2d)
            for a, b in hardware_table(spec): print(f"{a:28}{b}")
            n = 2
            for name, curve in (("all-gather", spec.all_gather), ("reduce", spec.reduce_scatter)):
                print(name, "bus GB/s", [(size >> 20, round(size / s / 2 / 1e9)) for size, s in curve.points])
            save_hardware(spec, os.environ["OUT"] + f"/hardware_two_{threads}.json")
    dist.destroy_process_group()

ranks()
