// The kernels that treat each row of a step by itself, between the matrix products.
#include "elements.cuh"

// to (count, 4) = from, which lies in host memory.
extern "C" __global__ void fetch(int4* to, const int4* from, int count) {
  for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x) to[at] = from[at];
}

// hidden (rows, width) float32 = scale · embedding[tokens].
extern "C" __global__ void embed(float* hidden, const ELEMENT* embedding, const int* tokens, int width, float scale) {
  const ELEMENT* from = embedding + (long long)tokens[blockIdx.x] * width;
  float* to = hidden + (long long)blockIdx.x * width;
  for (int at = threadIdx.x * PACK; at < width; at += blockDim.x * PACK) {
    const Pack pack = *(const Pack*)(from + at);
    FloatPack floats;
#pragma unroll
    for (int i = 0; i < PACK; i++) floats.of[i] = wide(pack.of[i]) * scale;
    *(FloatPack*)(to + at) = floats;
  }
}

// normed (rows, width) = RMSNorm of hidden's rows, or of the `picked` ones. A bias, if there is one, is first added to
// hidden itself: it belongs to the product that was just accumulated there.
extern "C" __global__ void rms_norm(ELEMENT* normed, float* hidden, const float* bias, const float* weight,
                                    const int* picked, int width, float epsilon) {
  __shared__ float sums[WARP];
  float* row = hidden + (long long)(picked ? picked[blockIdx.x] : blockIdx.x) * width;
  const int first = threadIdx.x * PACK;
  const FloatPack first_factors = *(const FloatPack*)(weight + min(first, width - PACK));
  after_others();
  float sum = 0;
  for (int at = first; at < width; at += blockDim.x * PACK) {
    FloatPack pack = *(FloatPack*)(row + at);
    if (bias) {
#pragma unroll
      for (int i = 0; i < PACK; i++) pack.of[i] += bias[at + i];
      *(FloatPack*)(row + at) = pack;
    }
#pragma unroll
    for (int i = 0; i < PACK; i++) sum += pack.of[i] * pack.of[i];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  sum = warp_sum(threadIdx.x % WARP < blockDim.x / WARP ? sums[threadIdx.x % WARP] : 0);
  const float scale = rsqrtf(sum / width + epsilon);
  ELEMENT* to = normed + (long long)blockIdx.x * width;
  for (int at = first; at < width; at += blockDim.x * PACK) {
    const FloatPack floats = *(const FloatPack*)(row + at);
    const FloatPack factors = at == first ? first_factors : *(const FloatPack*)(weight + at);
    Pack pack;
#pragma unroll
    for (int i = 0; i < PACK; i++) pack.of[i] = narrow(floats.of[i] * scale * factors.of[i]);
    *(Pack*)(to + at) = pack;
  }
}

// normed (rows, width) = hidden's rows, for models without a norm before attention or the feed-forward part.
extern "C" __global__ void narrow_rows(ELEMENT* normed, const float* hidden, int width) {
  const long long first = (long long)blockIdx.x * width;
  for (int at = threadIdx.x; at < width; at += blockDim.x) normed[first + at] = narrow(hidden[first + at]);
}

// to (rows, width) = RMSNorm of from's rows + bias, or with `add` that times `factor` is added. All are float32. Rows
// begin `stride` apart in both, which may be the same array.
extern "C" __global__ void norm_floats(float* to, const float* from, const float* bias, const float* weight, int stride,
                                       int width, float epsilon, int add, float factor) {
  __shared__ float sums[WARP];
  from += (long long)blockIdx.x * stride;
  to += (long long)blockIdx.x * stride;
  float sum = 0;
  for (int at = threadIdx.x; at < width; at += blockDim.x) {
    const float x = from[at] + (bias ? bias[at] : 0);
    sum += x * x;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
  __syncthreads();
  sum = warp_sum(threadIdx.x % WARP < blockDim.x / WARP ? sums[threadIdx.x % WARP] : 0);
  const float scale = rsqrtf(sum / width + epsilon);
  for (int at = threadIdx.x; at < width; at += blockDim.x) {
    const float normed = (from[at] + (bias ? bias[at] : 0)) * scale * weight[at];
    to[at] = add ? to[at] + factor * normed : normed;
  }
}

// logits (count) = scale · logits, bent by tanh to at most `cap` if that is not 0.
extern "C" __global__ void bend(float* logits, long long count, float scale, float cap) {
  for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (long long)gridDim.x * blockDim.x) {
    const float logit = logits[at] * scale;
    logits[at] = cap > 0 ? cap * tanhf(logit / cap) : logit;
  }
}

// sums (spans, width) float64, in host memory = the sum of each span (first row, rows) of normed (rows, width).
extern "C" __global__ void sum_rows(double* sums, const ELEMENT* normed, const int2* spans, int width) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= width) return;
  const int2 span = spans[blockIdx.y];
  const ELEMENT* from = normed + (long long)span.x * width + column;
  double sum = 0;
#pragma unroll 8
  for (int row = 0; row < span.y; row++) sum += wide(from[(long long)row * width]);
  sums[(long long)blockIdx.y * width + column] = sum;
}

// activated (rows, width) = activate(gate) · up, where gate_up (rows, 2 · width) float32 holds the gate, then up.
extern "C" __global__ void swiglu(ELEMENT* activated, const float* gate_up, int width) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * PACK;
  after_others();
  if (at >= width) return;
  const float* row = gate_up + (long long)blockIdx.x * 2 * width;
  const FloatPack gate = *(const FloatPack*)(row + at), up = *(const FloatPack*)(row + width + at);
  Pack pack;
#pragma unroll
  for (int i = 0; i < PACK; i++) pack.of[i] = narrow(activate(gate.of[i]) * up.of[i]);
  *(Pack*)(activated + (long long)blockIdx.x * width + at) = pack;
}

// Adds biases to q, k and v, norms q and k (QUERY_NORM 1: each head; 2: norm_floats has done it, biases included), and
// rotates them in Hugging Face's order: pairs i, i + ROTATED / 2 of each head; the other elements stay as they are. Writes
// q, with its rounding errors (REST), and writes k and v to their places in the paged cache. qkv is (rows, heads +
// 2 · kv_heads, HEAD_DIM) float32; `norms` has a head's factors for q, then for k; place = slot · BLOCK_SIZE + offset. A row
// with position -1 is padding and leaves no trace. To norm heads, a thread block has whole heads.
extern "C" __global__ void rotate_and_store(ELEMENT* q, ELEMENT* q_rest, ELEMENT* pages, const float* qkv, const float* bias,
                                            const float* norms, const float* cosines, const float* sines,
                                            const int* positions, const int* places, long long slot_stride,
                                            long long layer_offset, int heads, int kv_heads, float epsilon) {
  const int half = HEAD_DIM / 2, row = blockIdx.x, position = positions[row], all_heads = heads + 2 * kv_heads;
  const int pair = blockIdx.y * blockDim.x + threadIdx.x, head = pair / half, i = pair % half;
  const bool rotates = position >= 0 && head < heads + kv_heads;
  const float cosine = rotates ? cosines[(long long)position * half + i] : 1;
  const float sine = rotates ? sines[(long long)position * half + i] : 0;
  after_others();
  if (position < 0 || (QUERY_NORM != 1 && head >= all_heads)) return;
  const bool turns = ROTATED == HEAD_DIM || i < ROTATED / 2;
  const int first = turns ? i : i + ROTATED / 2, second = i + (turns ? ROTATED / 2 : half);
  const int column = head * HEAD_DIM;
  float low = 0, high = 0;
  if (head < all_heads) {
    const float* from = qkv + (long long)row * all_heads * HEAD_DIM + column;
    low = from[first], high = from[second];
    if (bias && (QUERY_NORM != 2 || head >= heads + kv_heads)) low += bias[column + first], high += bias[column + second];
  }
#if QUERY_NORM == 1
  __shared__ float squares[half > 256 ? half : 256];
  squares[threadIdx.x] = low * low + high * high;
  __syncthreads();
  if (head >= all_heads) return;
  if (head < heads + kv_heads) {
    float sum = 0;
#pragma unroll 8
    for (int at = 0; at < half; at++) sum += squares[threadIdx.x - i + at];
    const float scale = rsqrtf(sum / HEAD_DIM + epsilon);
    const float* factors = norms + (head < heads ? 0 : HEAD_DIM);
    low *= scale * factors[first], high *= scale * factors[second];
  }
#endif
  if (rotates) {
    const float turned = low * cosine - high * sine;
    high = high * cosine + low * sine;
    low = turned;
  }
  ELEMENT* to;
  if (head < heads) {
    const long long at = ((long long)row * heads + head) * HEAD_DIM;
    to = q + at;
    if (REST) {
      q_rest[at + first] = narrow(low - wide(narrow(low)));
      q_rest[at + second] = narrow(high - wide(narrow(high)));
    }
  } else {
    const int place = places[row], kv_head = (head - heads) % kv_heads, values = head >= heads + kv_heads;
    to = pages + (long long)(place / BLOCK_SIZE) * slot_stride + layer_offset +
         ((long long)(values * BLOCK_SIZE + place % BLOCK_SIZE) * kv_heads + kv_head) * HEAD_DIM;
  }
  to[first] = narrow(low);
  to[second] = narrow(high);
}
