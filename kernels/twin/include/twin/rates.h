// Documented rates of Ascend 910B and 910C, in units per cycle of one core. Memory itself, which all cores share, bounds a
// launch as a whole: kernels/twin/cost.py.
#pragma once

#include <cstddef>

namespace AscendC::twin::rates {

constexpr double kVectorBytes = 256;   // one repeat of a vector instruction per cycle
constexpr double kSlowElements = 32;   // Exp, Ln, Div; Sqrt is taken to be as slow
constexpr double kCastElements = 64;   // 32 to int64
constexpr double kGatherBytes = 84;    // 21 elements of four bytes, 42 of two
constexpr double kGatherMaskBytes = 128;
constexpr double kBroadcastElements = 8;  // inputs of Brcb
constexpr double kL2Bytes = 110;          // from the L2 cache to a core
constexpr double kStoreBytes = 64;        // from the unified buffer outwards
constexpr double kL0aBytes = 512;         // from L1
constexpr double kL0bBytes = 256;         // from L1
constexpr double kFixpipeBytes = 256;     // from L0C outwards
constexpr double kMacsHalf = 4096;        // of the cube, fp16 and bf16
constexpr double kMacsFloat = 1024;       // fp32: a quarter, as the peaks of the device are to each other
constexpr double kVectorsPerCube = 2;     // vector cores that share a cube core

}  // namespace AscendC::twin::rates
