// A tensor core's product on 16 × 8 tiles: d (16, 8) += a (16, 16) · b (16, 8), spread over a warp.
//
//     g = lane / 4, c = lane % 4          a: [0] row g,  k 2c, 2c+1    [1] row g+8, the same k    [2], [3] the same rows, k + 8
//                                         b: [0] k 2c, 2c+1, column g  [1] k + 8
//                                         d: [0], [1] row g, columns 2c, 2c+1    [2], [3] row g + 8
#pragma once
#include "elements.cuh"

#if ELEMENT_BFLOAT
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif

__device__ __forceinline__ void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1) {
  asm volatile(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats as one register of two elements, the first in the lower half.
__device__ __forceinline__ unsigned paired(float low, float high) {
  const ELEMENT both[2] = {narrow(low), narrow(high)};
  return *(const unsigned*)both;
}
