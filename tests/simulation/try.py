import sys, time, tempfile, traceback
sys.path.insert(0, "tests/simulation")
from pathlib import Path
from sim_run import SimulatedRun
from etude.rl import loop, orchestrator
from etude.rollouts import run_service
loop.POLL_S = 0.25
from etude.inference import sampler_process
sampler_process.say = lambda *a, **k: None
orchestrator.TICK_S = 0.5
a, b = int(sys.argv[1]), int(sys.argv[2])
faults = {"y": True, "n": False}.get(sys.argv[3]) if len(sys.argv) > 3 else None
show = len(sys.argv) > 4
bad = []
t0 = time.time()
for seed in range(a, b):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as d:
        started = time.time()
        run = SimulatedRun(seed, Path(d), faults)
        try:
            run.run()
            why = "ok"
        except BaseException as e:
            why = f"{type(e).__name__}: {e}"[:1500]
            bad.append(seed)
            if show: traceback.print_exc()
        s = run.simulation
        if show: print("\n".join(s.log[-int(sys.argv[4]):]))
        print(seed, f"{time.time()-started:.2f}s virtual {s.now:.0f} switches {s.switches} faults {len(run.plan.faults)} {why}", flush=True)
print(f"{time.time()-t0:.1f}s bad {bad}")
