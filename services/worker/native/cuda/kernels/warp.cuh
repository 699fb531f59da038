// What kernels of all types have in common.
#pragma once

#ifndef INFINITY  // NVRTC has no math.h
#define INFINITY __int_as_float(0x7f800000)
#endif
#define WARP 32
#define EVERY_LANE 0xffffffffu

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(EVERY_LANE, x, step);
  return x;
}
