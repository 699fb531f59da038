// Paged attention of single rows over their context, for 16-bit types. It reads keys and values once, directly from the
// pages into the tensor core's registers, for all query heads of a KV head together.
//
// A thread block is one split of one sequence's context for one KV head (at most 8 query heads); its 4 warps take 16
// positions each in turn, and merge at the end. `merge_splits` merges the splits if there are several.
//
//   scores  (heads, 8 positions)  = q (8 heads and their rounding errors: 16 rows) · keysᵀ: two products
//   mixedᵀ  (16 dims, 8 heads)   += valuesᵀ (16 dims, 16 positions) · weightsᵀ: the scores already lie in its registers
//
// With WINDOWED a row attends to the last `window` positions alone: the first tile is the one with the first of them.
// A sum over dims may be taken in any order if q and keys have the same order, and output rows may be any dims. So each
// lane loads 16 bytes of a row at once, and no shared memory is needed to rearrange anything.
#include "tensor_cores.cuh"

#define WARPS 4
#define TILE 16
#define STRIDE (WARPS * TILE)
#define HEADS 8  // of one product
#define GROUP_TILES ((GROUP + HEADS - 1) / HEADS)
static_assert(BLOCK_SIZE % TILE == 0 && HEAD_DIM % 64 == 0, "a tile lies in one block; lanes take 8 dims of 64");

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
    attend_decode(ELEMENT* attended, float* split_mixed, float2* split_sums, const ELEMENT* q,
                  const ELEMENT* q_rest, const ELEMENT* pages, const int* rows, const int* positions,
                  const int* tables, const int* table_starts, long long slot_stride, long long layer_offset,
                  int kv_heads, float scale_log2, int window) {
  const int split = blockIdx.x, splits = gridDim.x, kv_head = blockIdx.y / GROUP_TILES;
  const int row = rows[blockIdx.z], first_head = kv_head * GROUP + blockIdx.y % GROUP_TILES * HEADS;
  const int heads = kv_heads * GROUP, heads_here = min(HEADS, (kv_head + 1) * GROUP - first_head);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, c = lane % 4;
  const int length = positions[row] + 1;
  const int unseen = WINDOWED ? max(0, length - window) : 0, base = unseen / TILE * TILE;
  const int span = ((length - base + STRIDE - 1) / STRIDE + splits - 1) / splits * STRIDE;
  const int begin = base + split * span, end = min(begin + span, length);
  const int* table = tables + table_starts[row];
  const long long step = (long long)kv_heads * HEAD_DIM;  // from one position to the next
  const ELEMENT* origin = pages + layer_offset + kv_head * HEAD_DIM;

  uint4 query[HEAD_DIM / 32], rest[HEAD_DIM / 32];
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 32; j++) {
    const long long at = ((long long)row * heads + first_head + g) * HEAD_DIM + 32 * j + 8 * c;
    query[j] = g < heads_here ? *(const uint4*)(q + at) : make_uint4(0, 0, 0, 0);
    rest[j] = REST && g < heads_here ? *(const uint4*)(q_rest + at) : make_uint4(0, 0, 0, 0);
  }
  float mixed[HEAD_DIM / 16][4] = {}, greatest = -INFINITY, total = 0;

  int at = begin + warp * TILE;
  int slot = at < end ? table[at / BLOCK_SIZE] : 0;
  for (; at < end; at += STRIDE) {
    const ELEMENT* block = origin + slot * slot_stride + at % BLOCK_SIZE * step;
    const int last = end - 1 - at;  // positions beyond are not read: they may hold anything
    uint4 keys[2][HEAD_DIM / 32], values[4][HEAD_DIM / 64];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 32; j++)
        keys[n][j] = __ldg((const uint4*)(block + min(8 * n + g, last) * step + 32 * j + 8 * c));
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 64; j++)
        values[n][j] = __ldg((const uint4*)(block + (BLOCK_SIZE + min(2 * c + n % 2 + n / 2 * 8, last)) * step + 64 * j + 8 * g));
    if (at + STRIDE < end) slot = table[(at + STRIDE) / BLOCK_SIZE];

    float scores[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 32; j++) {
        multiply(scores[n], query[j].x, rest[j].x, query[j].y, rest[j].y, keys[n][j].x, keys[n][j].y);
        multiply(scores[n], query[j].z, rest[j].z, query[j].w, rest[j].w, keys[n][j].z, keys[n][j].w);
      }
      scores[n][0] += scores[n][2], scores[n][1] += scores[n][3];
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (8 * n + 2 * c + i > last || (WINDOWED && at + 8 * n + 2 * c + i < unseen)) scores[n][i] = -INFINITY;
    }
    const float before = greatest;
    greatest = fmaxf(greatest, fmaxf(fmaxf(scores[0][0], scores[0][1]), fmaxf(scores[1][0], scores[1][1])));
    greatest = fmaxf(greatest, __shfl_xor_sync(EVERY_LANE, greatest, 1));
    greatest = fmaxf(greatest, __shfl_xor_sync(EVERY_LANE, greatest, 2));
    const float shrink = exp2f((before - greatest) * scale_log2);
    total *= shrink;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) total += scores[n][i] = exp2f((scores[n][i] - greatest) * scale_log2);
    const unsigned low = paired(scores[0][0], scores[0][1]), high = paired(scores[1][0], scores[1][1]);
    const float left = __shfl_sync(EVERY_LANE, shrink, 8 * c), right = __shfl_sync(EVERY_LANE, shrink, 8 * c + 4);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 64; j++) {
#pragma unroll
      for (int w = 0; w < 4; w++) {
        unsigned word[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
          word[n] = w == 0 ? values[n][j].x : w == 1 ? values[n][j].y : w == 2 ? values[n][j].z : values[n][j].w;
        float(&to)[4] = mixed[4 * j + w];
        to[0] *= left, to[1] *= right, to[2] *= left, to[3] *= right;
        multiply(to, __byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
                 __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632), low, high);
      }
    }
  }
  total += __shfl_xor_sync(EVERY_LANE, total, 1);
  total += __shfl_xor_sync(EVERY_LANE, total, 2);

  __shared__ float all_mixed[WARPS][HEADS][HEAD_DIM], all_greatest[WARPS][HEADS], all_totals[WARPS][HEADS];
#pragma unroll
  for (int j = 0; j < HEAD_DIM / 64; j++)
#pragma unroll
    for (int w = 0; w < 4; w++)
#pragma unroll
      for (int i = 0; i < 4; i++) all_mixed[warp][2 * c + i % 2][64 * j + 8 * g + 2 * w + i / 2] = mixed[4 * j + w][i];
  if (c == 0) all_greatest[warp][g] = greatest, all_totals[warp][g] = total;
  __syncthreads();
  for (int which = threadIdx.x; which < heads_here * HEAD_DIM; which += blockDim.x) {
    const int head = which / HEAD_DIM, dim = which % HEAD_DIM;
    float top = -INFINITY, sum = 0, weights = 0;
    for (int other = 0; other < WARPS; other++) top = fmaxf(top, all_greatest[other][head]);
    for (int other = 0; other < WARPS; other++) {
      const float share = all_totals[other][head] == 0 ? 0 : exp2f((all_greatest[other][head] - top) * scale_log2);
      sum += share * all_mixed[other][head][dim];
      weights += share * all_totals[other][head];
    }
    const long long place = (long long)row * heads + first_head + head;
    if (splits == 1) {
      attended[place * HEAD_DIM + dim] = narrow(weights == 0 ? 0 : sum / weights);
    } else {
      const long long part = ((long long)blockIdx.z * heads + first_head + head) * splits + split;
      split_mixed[part * HEAD_DIM + dim] = sum;
      if (dim == 0) split_sums[part] = make_float2(top, weights);
    }
  }
}

// Computes each row's and head's attended from its splits' sums; a thread is one dim.
extern "C" __global__ void merge_splits(ELEMENT* attended, const float* split_mixed, const float2* split_sums,
                                        const int* rows, int splits, float scale_log2) {
  const long long first = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * splits;
  float top = -INFINITY, sum = 0, weights = 0;
  for (int split = 0; split < splits; split++) top = fmaxf(top, split_sums[first + split].x);
  for (int split = 0; split < splits; split++) {
    const float2 part = split_sums[first + split];
    if (part.y <= 0) continue;
    const float share = exp2f((part.x - top) * scale_log2);
    sum += share * split_mixed[(first + split) * HEAD_DIM + threadIdx.x];
    weights += share * part.y;
  }
  attended[((long long)rows[blockIdx.y] * gridDim.x + blockIdx.x) * HEAD_DIM + threadIdx.x] =
      narrow(weights == 0 ? 0 : sum / weights);
}
