// Paged attention of single rows over their context, for 16-bit types. It reads keys and values once, directly from the
// pages into the tensor core's registers, for all query heads of a KV head together.
//
// A thread block is one split of one row's context for one KV head (at most 8 query heads); its 4 warps take 16
// positions each in turn, and merge at the end. `merge_splits` merges the splits of a row if there are several. How many
// each row has is planned for each step (splits.py), so the grid can be larger than needed: unused splits are of row -1.
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

// How a row that attends to the last of `length` positions is cut into at most `splits` splits.
struct Cut {
  int unseen, base, span, splits;
};

__device__ __forceinline__ Cut cut(int length, int splits, int window) {
  const int unseen = WINDOWED ? max(0, length - window) : 0, base = unseen / TILE * TILE;
  const int rounds = (length - base + STRIDE - 1) / STRIDE, each = max(1, (rounds + splits - 1) / splits);
  return {unseen, base, each * STRIDE, max(1, (rounds + each - 1) / each)};  // a window can leave splits without positions
}

// The grid is (KV heads × GROUP_TILES, splits). `splits` has for each one its row, its number within the row, and the
// number of splits of that row.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
    attend_decode(ELEMENT* attended, float* split_mixed, float2* split_sums, const ELEMENT* q,
                  const ELEMENT* q_rest, const ELEMENT* pages, const int* splits, const int* positions,
                  const int* tables, const int* table_starts, long long slot_stride, long long layer_offset,
                  int kv_heads, float scale_log2, int window) {
  const int row = splits[3 * blockIdx.y], split = splits[3 * blockIdx.y + 1];
  const int length = row < 0 ? 0 : positions[row] + 1;
  const Cut parts = cut(length, splits[3 * blockIdx.y + 2], window);
  after_others();
  if (row < 0) return;
  if (split >= parts.splits) return;
  const int kv_head = blockIdx.x / GROUP_TILES, first_head = kv_head * GROUP + blockIdx.x % GROUP_TILES * HEADS;
  const int heads = kv_heads * GROUP, heads_here = min(HEADS, (kv_head + 1) * GROUP - first_head);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, c = lane % 4;
  const int unseen = parts.unseen, begin = parts.base + split * parts.span, end = min(begin + parts.span, length);
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
    if (parts.splits == 1) {
      attended[place * HEAD_DIM + dim] = narrow(weights == 0 ? 0 : sum / weights);
    } else {
      const long long part = (long long)blockIdx.y * heads + first_head + head;
      split_mixed[part * HEAD_DIM + dim] = sum;
      if (dim == 0) split_sums[part] = make_float2(top, weights);
    }
  }
}

// Computes attended of rows that have several splits from the sums of these; a thread is one dim of one head. `singles`
// has for each row its number, its first split, and its number of splits.
extern "C" __global__ void merge_splits(ELEMENT* attended, const float* split_mixed, const float2* split_sums,
                                        const int* singles, const int* positions, int heads, float scale_log2,
                                        int window) {
  const int row = singles[3 * blockIdx.y], head = blockIdx.x * blockDim.y + threadIdx.y;
  const int splits = cut(positions[row] + 1, singles[3 * blockIdx.y + 2], window).splits;
  after_others();
  if (splits == 1 || head >= heads) return;
  const long long first = (long long)singles[3 * blockIdx.y + 1] * heads + head;
  float top = -INFINITY, sum = 0, weights = 0;
  for (int split = 0; split < splits; split++) top = fmaxf(top, split_sums[first + (long long)split * heads].x);
  for (int split = 0; split < splits; split++) {
    const long long at = first + (long long)split * heads;
    const float2 part = split_sums[at];
    if (part.y <= 0) continue;
    const float share = exp2f((part.x - top) * scale_log2);
    sum += share * split_mixed[at * HEAD_DIM + threadIdx.x];
    weights += share * part.y;
  }
  attended[((long long)row * heads + head) * HEAD_DIM + threadIdx.x] = narrow(weights == 0 ? 0 : sum / weights);
}
