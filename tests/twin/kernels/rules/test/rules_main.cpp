// One kernel of many small cases; which one runs is a number in the tiling.
#include "tikicpulib.h"

struct RulesTiling {
  int64_t which;
};
struct RulesProblem {
  int64_t which, blocks, mix;
};
struct RulesLaunch {
  int64_t blocks, workspace, tilingBytes;
};
inline bool mix = false;

extern "C" __global__ __aicore__ void rules(GM_ADDR x, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling);

extern "C" void tile_rules(const RulesProblem* problem, RulesTiling* tiling, RulesLaunch* launch) {
  tiling->which = problem->which;
  mix = problem->mix != 0;
  *launch = {problem->blocks, 65536, sizeof(RulesTiling)};
}

extern "C" void run_rules(uint8_t** gm, uint8_t* workspace, uint8_t* tiling, uint32_t blocks) {
  AscendC::SetKernelMode(mix ? KernelMode::MIX_MODE : KernelMode::AIV_MODE);
  ICPU_RUN_KF(rules, blocks, gm[0], gm[1], workspace, tiling);
}
