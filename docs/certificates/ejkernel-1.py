# ejkernel: gradient of bias is wrong by 0.2 of a row's size; rounding explains 0.0003
import jax, jax.numpy as jnp, numpy as np
from ejkernel.types.mask import MaskInfo
from ejkernel.modules import flash_attention as f
rng = np.random.default_rng(0)
q, k, v, d, bias = (jnp.asarray(rng.integers(-2, 3, s), jnp.float32) for s in ((1, 2, 1, 1), (1, 2, 1, 1), (1, 2, 1, 1), (1, 2, 1, 1), (1, 1, 2, 2)))
call = lambda q, k, v, bias: f(q, k, v, jnp.asarray(bias), platform='xla')
def run(*x):
    out, back = jax.vjp(call, *x)
    return out, *back(d.astype(out.dtype))
got = [np.asarray(x, np.float64) for x in jax.jit(run)(q, k, v, bias)]
q, k, v, d, bias = (np.asarray(x, np.float64) for x in (q, k, v, d, bias))
x = np.einsum("bihd,bjhd->bhij", q, k) * 1 ** -0.5 + bias
e = np.exp(x - x.max(-1, keepdims=True))
w = e / e.sum(-1, keepdims=True)
want = [np.einsum("bhij,bjhd->bihd", w, v)]
dw = np.einsum("bihd,bjhd->bhij", d, v)
inner = (w * dw).sum(-1, keepdims=True)
dx = dlogit = w * (dw - inner)
want.append(np.einsum("bhij,bjhd->bihd", dx, k) * 1 ** -0.5)
want.append((np.einsum("bhij,bihd->bjhd", dx, q) * 1 ** -0.5))
want.append(np.einsum("bhij,bihd->bjhd", w, d))
want.append(dlogit)
for name, a, b in zip(("output", "gradient of q", "gradient of k", "gradient of v", "gradient of bias"), got, want):
    print(name, "is wrong by", np.abs(a - b).max())
