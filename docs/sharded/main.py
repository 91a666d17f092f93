"""Fine-tune a causal language model of Hugging Face's, divided among all GPUs."""

import argparse
import os
import shutil
import subprocess
import time
import zlib
from glob import glob
from pathlib import Path

import numpy as np
import resume
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
add = parser.add_argument
add("--model", default="pretrained", help="the folder of the model to start from")
add("--batch-size", type=int, default=64, help="samples of a step, in all")
add("--micro-batch-size", type=int, default=1, help="samples of a GPU at a time")
add("--epochs", type=int, default=2)
add("--learning-rate", type=float, default=1e-5)
add("--copies", type=int, default=1, help="of the model: one, or one a node (HSDP)")
add("--resume", type=lambda path: path.rstrip("/"), help="a checkpoint of another job")
args = parser.parse_args()

rank = int(os.environ.get("SLURM_PROCID", 0))
local_rank = int(os.environ.get("SLURM_LOCALID", 0))
world_size = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
if int(os.environ.get("SLURM_NTASKS", world_size)) != world_size:
    raise SystemExit("main.py: error: this is no task of the job: start it with srun")
if world_size == 1:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
elif "MASTER_ADDR" not in os.environ:  # job.sh sets both, salloc neither
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    os.environ["MASTER_ADDR"] = subprocess.check_output(command, text=True).split()[0]
    os.environ["MASTER_PORT"] = str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
run_dir = os.environ.get("RUN_DIR", ".")  # job.sh makes one for each job
partial = f"{run_dir}/partial"  # what is not whole yet
found = glob(f"{run_dir}/checkpoint-*")
if not os.path.exists("samples.npy"):
    parser.error("no samples.npy: run pack.py")
if min(args.batch_size, args.micro_batch_size, args.copies, args.epochs) < 1:
    parser.error("batches, --copies and --epochs are at least 1")
samples = np.load("samples.npy", mmap_mode="r")
some = np.ascontiguousarray(samples[:: len(samples) // 100 + 1])
digest = f"{len(samples)} samples, {zlib.crc32(some):08x}"
steps = len(samples) // args.batch_size  # of an epoch
total = args.epochs * steps
if not os.path.exists(f"{args.model}/config.json"):
    parser.error(f"no model in {args.model}")
config = AutoConfig.from_pretrained(args.model)
dtype = config.dtype or torch.float32  # of the files: from_config changes it
if getattr(config, "quantization_config", None):
    parser.error(f"{args.model} is quantized: take the model in bfloat16")
if os.path.exists(f"{run_dir}/model"):
    parser.error(f"{run_dir}/model is there already")
if steps == 0:
    parser.error(f"{len(samples)} samples, and a step takes {args.batch_size}")
if args.batch_size % (world_size * args.micro_batch_size):
    each = f"{args.micro_batch_size} samples at a time"
    parser.error(f"no batch of {args.batch_size} on {world_size} ranks, {each}")
if args.resume and not found and not os.path.exists(f"{args.resume}/.metadata"):
    parser.error(f"no checkpoint in {args.resume}")
if world_size % args.copies:
    parser.error(f"no {args.copies} copies on {world_size} ranks")

gpu = None
if device.type == "cuda":
    gpu = device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
backend = "nccl" if gpu else "gloo"
dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=gpu)

nodes = [None] * world_size
dist.all_gather_object(nodes, int(os.environ.get("SLURM_NODEID", 0)))
by_node = torch.tensor(nodes).argsort(stable=True).reshape(args.copies, -1)
by_node = by_node.sort().values  # PyTorch wants each row in the order of its ranks
mesh = DeviceMesh(device.type, by_node, mesh_dim_names=("copies", "parts"))
policy = MixedPrecisionPolicy(torch.bfloat16 if gpu else None, torch.float32)
with torch.device("meta"):  # no memory yet
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.activation_checkpointing_enable()
layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
for module in [*layers, model]:
    fully_shard(module, mesh=mesh, mp_policy=policy)
model.to_empty(device=device)  # memory for this rank's part
for module in model.modules():
    if module._buffers:  # they are not in the files
        model._init_weights(module)
tied = model.all_tied_weights_keys  # the files have one of the two
weights = {name: w for name, w in model.state_dict().items() if name not in tied}
optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas=(0.9, 0.95))
# The order of the samples and the rate follow from these.
settings = {"batch_size": args.batch_size, "epochs": args.epochs, "data": digest}
run = {"model": model, "optimizer": optimizer, "settings": dict(settings)}

resume.on_rank_0("cannot lock the folder", lambda: resume.lock(Path(run_dir)))
path = max(found, key=lambda path: int(path.split("-")[-1]), default=args.resume)
path = resume.tell_all(path)  # rank 0 decides for all
first = int(path.split("-")[-1]) if path else 0
if rank == 0:
    shutil.rmtree(partial, ignore_errors=True)  # of a job that was killed
try:
    if path:
        get_optimizer_state_dict(model, optimizer)  # makes what load fills
        dcp.load(run, checkpoint_id=path)
        if run["settings"] != settings:
            resume.fail(f"{path} is of {run['settings']}, this is {settings}")
        resume.say(f"Resumed {path}: step {first} of {total}")
    else:
        reader = dcp.HuggingFaceStorageReader(args.model)
        names = reader.read_metadata().state_dict_metadata.keys()
        if others := names - weights.keys() - tied.keys():
            resume.fail(f"{args.model}: not in its model: {min(others)}")
        dcp.load(weights, storage_reader=reader)
except dcp.CheckpointException as failure:
    reason = next(iter(failure.failures.values()))[0]
    resume.fail(f"{path or args.model}: {reason}")

# Does the second document of a sample depend on the first? In some models it does.
tokens = torch.tensor([[5, 6, 7, 8, 9], [8, 9, 7, 8, 9]], device=device)
positions = torch.tensor([[0, 1, 0, 1, 2]] * 2, device=device)
model.eval()
with torch.no_grad():
    one, two = model(tokens, position_ids=positions, use_cache=False).logits[:, 2:]
model.train()
if (one - two).abs().max() > 0.02 * one.abs().max():
    resume.fail("in this model, documents of a sample are mixed")


def save(name, content, writer):
    """Each rank writes its part. Rank 0 gives the folder its name when it is whole."""
    try:
        dcp.save(content, storage_writer=writer)
    except dcp.CheckpointException as failure:  # the same on all ranks
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # this makes room
        reason = next(iter(failure.failures.values()))[0]
        resume.fail(f"{name}: disk full? {reason}")
    if rank == 0:
        shutil.rmtree(f"{partial}/sharded", ignore_errors=True)  # the model's parts
        os.replace(partial, f"{run_dir}/{name}")
        print(f"Saved {run_dir}/{name}", flush=True)
    dist.barrier()


saved_at = time.monotonic()
for step in range(first, total):
    order = np.random.default_rng(step // steps).permutation(len(samples))
    batch = order[: steps * args.batch_size].reshape(steps, -1)[step % steps]
    count = max(1, (samples[batch, 1] >= 0).sum())  # targets of all ranks
    if samples[batch, 0].max() >= model.get_input_embeddings().num_embeddings:
        resume.fail("a token is not in the model's vocabulary")
    resume.seed(resume.make_seed(step, rank))  # of dropout: the same after a resume
    loss = torch.zeros((), device=device)
    for part in batch.reshape(-1, world_size, args.micro_batch_size)[:, rank]:
        part = torch.from_numpy(samples[part].astype(np.int64)).to(device)
        tokens, targets, positions = part.unbind(1)
        logits = model(tokens, position_ids=positions, use_cache=False).logits
        logits, targets = logits.flatten(0, 1).float(), targets.flatten()
        share = F.cross_entropy(logits, targets, reduction="sum") / count
        (share * world_size).backward()  # FSDP takes the mean over the ranks
        loss += share.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    if not norm.isfinite():
        resume.fail(f"NaN in the gradients of step {step}")
    factor = min((step + 1) / 10, 1 - step / total)  # warm-up, then down to 0
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate * factor
    optimizer.step()
    optimizer.zero_grad()
    due = step + 1 == total or time.monotonic() - saved_at > 1800
    loss, due, stop = resume.reduce([loss, due, len(resume.warned)])  # of all ranks
    resume.say(f"Step {step}: loss {loss:.4f}, gradient norm {norm:.4f}")
    if due or stop:
        old = glob(f"{run_dir}/checkpoint-*")
        save(f"checkpoint-{step + 1}", run, dcp.FileSystemWriter(partial))
        if rank == 0:
            for path in old:
                shutil.rmtree(path)
        saved_at = time.monotonic()
    if stop:
        resume.leave(75)  # not finished: job.sh starts the job again
trained = model.state_dict()
weights = {name: trained[name].to(dtype=dtype) for name in weights}
writer = dcp.HuggingFaceStorageWriter(
    partial, save_distributed=True, enable_consolidation=True
)
if rank == 0:  # the configuration and the tokenizer
    but_weights = shutil.ignore_patterns("*.safetensors*", "*.bin*", "*.pth", ".*")
    shutil.copytree(args.model, partial, ignore=but_weights, dirs_exist_ok=True)
    shutil.copymode(run_dir, partial)  # the model's folder may be read-only
save("model", weights, writer)
time.sleep(0.1)  # gloo, on CPUs, still frees tensors: Python must not end yet
dist.destroy_process_group()
