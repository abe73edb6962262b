import time, torch, torch.distributed as dist
def b(mesh):
    out={}
    def med(f,n=15):
        xs=[]
        for _ in range(n):
            dist.barrier()
            t=time.perf_counter(); f(); xs.append(time.perf_counter()-t)
        xs.sort(); return round(xs[n//2]*1e3,1)
    big=torch.ones(8<<20); part=torch.empty(4<<20); parts=torch.empty(2,4<<20)
    g=mesh.group("dp")
    for _ in range(2):
        out["a2a"]=med(lambda: dist.all_to_all_single(parts.view(-1),big))
        out["a2a fresh"]=med(lambda: dist.all_to_all_single(torch.empty(8<<20),big))
        out["sum"]=med(lambda: torch.sum(parts,0,out=part))
        out["add"]=med(lambda: torch.add(parts[0],parts[1],out=part))
        out["ours"]=med(lambda: g.reduce_scatter(part,big,reason="x",phase="step"))
        out["gloo"]=med(lambda: dist.reduce_scatter_single(part,big))
        out["ar"]=med(lambda: dist.all_reduce(big))
    return out
def test_b(ranks):
    print(ranks.run(2,b)[0])
