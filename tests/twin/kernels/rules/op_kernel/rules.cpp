// What AscendC forbids, or does not promise: each case breaks one rule, or keeps it where its neighbour breaks it.
#include "kernel_operator.h"
#include "lib/matmul_intf.h"

using namespace AscendC;

namespace {

constexpr int kCount = 256;  // floats: 1 KB

struct Bench {
  TPipe pipe;
  TQue<QuePosition::VECIN, 1> in;
  TQue<QuePosition::VECOUT, 1> out;
  TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> through;
  TBuf<QuePosition::VECCALC> work, more;
  GlobalTensor<float> x, y, space;

  Bench(GM_ADDR gx, GM_ADDR gy, GM_ADDR workspace) {
    x.SetGlobalBuffer(reinterpret_cast<float*>(gx), 4096);
    y.SetGlobalBuffer(reinterpret_cast<float*>(gy), 4096);
    space.SetGlobalBuffer(reinterpret_cast<float*>(workspace), 16384);
    pipe.InitBuffer(in, 2, 1024);
    pipe.InitBuffer(out, 2, 1024);
    pipe.InitBuffer(through, 2, 1024);
    pipe.InitBuffer(work, 2048);
    pipe.InitBuffer(more, 2048);
  }
  template <HardEvent event>
  void Sync() {
    const auto id = pipe.FetchEventID(event);
    SetFlag<event>(id);
    WaitFlag<event>(id);
  }
  LocalTensor<float> Loaded(int first = 0) {
    auto local = in.AllocTensor<float>();
    DataCopy(local, x[first], kCount);
    in.EnQue(local);
    return in.DeQue<float>();
  }
};

matmul::Matmul<matmul::MatmulType<TPosition::GM, CubeFormat::ND, float>,
               matmul::MatmulType<TPosition::GM, CubeFormat::ND, float>,
               matmul::MatmulType<TPosition::GM, CubeFormat::ND, float>>
Product() {
  return {};
}

TCubeTiling Small() {
  TCubeTiling t;
  t.M = t.N = t.Ka = t.Kb = t.singleCoreM = t.singleCoreN = t.singleCoreK = 16;
  t.baseM = t.baseN = t.baseK = 16;
  t.depthA1 = t.depthB1 = t.dbL0A = t.dbL0B = t.dbL0C = 1;
  return t;
}

// x rounded to a type of two bytes, and back.
template <typename T>
void Converted(Bench& b, GM_ADDR gy) {
  for (int i = 0; i < 4096; i += 256) {
    auto in = b.Loaded(i);
    auto out = b.out.AllocTensor<float>();
    Cast(b.work.Get<T>(), in, RoundMode::CAST_RINT, 256);
    PipeBarrier<PIPE_V>();
    Cast(out, b.work.Get<T>(), RoundMode::CAST_NONE, 256);
    b.in.FreeTensor(in);
    b.out.EnQue(out);
    out = b.out.DeQue<float>();
    DataCopy(b.y[i], out, 256);
    b.out.FreeTensor(out);
  }
}

}  // namespace

#define CASE(number) if (t.which == (number))

extern "C" __global__ __aicore__ void rules(GM_ADDR gx, GM_ADDR gy, GM_ADDR workspace, GM_ADDR tiling) {
  GET_TILING_DATA_WITH_STRUCT(RulesTiling, t, tiling);
  KERNEL_TASK_TYPE_DEFAULT(t.which >= 200 ? KERNEL_TYPE_MIX_AIC_1_2
                           : t.which >= 100 ? KERNEL_TYPE_MIX_AIV_1_0 : KERNEL_TYPE_AIV_ONLY);
  CASE(200) {  // products: the cube's result is read behind WaitIterateAll
    TPipe pipe;
    auto mm = Product();
    auto tile = Small();
    REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), mm, &tile);
    TBuf<QuePosition::VECCALC> work;
    pipe.InitBuffer(work, 1024);
    GlobalTensor<float> x, y, own;
    x.SetGlobalBuffer(reinterpret_cast<float*>(gx));
    y.SetGlobalBuffer(reinterpret_cast<float*>(gy));
    own = y[GetBlockIdx() * 256];
    mm.SetTensorA(x);
    mm.SetTensorB(x[256]);
    mm.IterateAll<false>(own, 0, false, true);
    mm.WaitIterateAll();
    DataCopy(work.Get<float>(), own, 256);
    return;
  }
  CASE(201) {  // … and not before
    TPipe pipe;
    auto mm = Product();
    auto tile = Small();
    REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), mm, &tile);
    TBuf<QuePosition::VECCALC> work;
    pipe.InitBuffer(work, 1024);
    GlobalTensor<float> x, y;
    x.SetGlobalBuffer(reinterpret_cast<float*>(gx));
    y.SetGlobalBuffer(reinterpret_cast<float*>(gy));
    mm.SetTensorA(x);
    mm.SetTensorB(x[256]);
    mm.IterateAll<false>(y[GetBlockIdx() * 256], 0, false, true);
    DataCopy(work.Get<float>(), y[GetBlockIdx() * 256], 256);
    mm.WaitIterateAll();
    return;
  }
  CASE(202) {  // a tiling that does not fit L0A
    TPipe pipe;
    auto mm = Product();
    auto tile = Small();
    tile.baseM = tile.baseK = 256;
    REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), mm, &tile);
    return;
  }
  CASE(203) {  // a product larger than its tiling
    TPipe pipe;
    auto mm = Product();
    auto tile = Small();
    REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), mm, &tile);
    mm.SetSingleShape(32, 16, 16);
    return;
  }
  CASE(204) {  // a transposed operand whose type is not
    TPipe pipe;
    auto mm = Product();
    auto tile = Small();
    REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), mm, &tile);
    GlobalTensor<float> x;
    x.SetGlobalBuffer(reinterpret_cast<float*>(gx));
    mm.SetTensorB(x, true);
    return;
  }
  CASE(205) {  // nobody waits
    TPipe pipe;
    auto mm = Product();
    auto tile = Small();
    REGIST_MATMUL_OBJ(&pipe, GetSysWorkSpacePtr(), mm, &tile);
    GlobalTensor<float> x, y;
    x.SetGlobalBuffer(reinterpret_cast<float*>(gx));
    y.SetGlobalBuffer(reinterpret_cast<float*>(gy));
    mm.SetTensorA(x);
    mm.SetTensorB(x);
    mm.IterateAll<false>(y[GetBlockIdx() * 256], 0, false, true);
    return;
  }

  Bench b(gx, gy, workspace);
  auto work = b.work.Get<float>();
  auto more = b.more.Get<float>();
  CASE(0) {  // in, add, out: every rule kept
    auto loaded = b.Loaded();
    auto result = b.out.AllocTensor<float>();
    Adds(result, loaded, 1.0f, kCount);
    b.out.EnQue(result);
    b.in.FreeTensor(loaded);
    auto ready = b.out.DeQue<float>();
    DataCopy(b.y[GetBlockIdx() * kCount], ready, kCount);
    b.out.FreeTensor(ready);
  }
  CASE(1) {  // a vector instruction reads what the one before wrote
    Duplicate(work, 1.0f, 64);
    Adds(more, work, 1.0f, 64);
  }
  CASE(2) {
    Duplicate(work, 1.0f, 64);
    PipeBarrier<PIPE_V>();
    Adds(more, work, 1.0f, 64);
  }
  CASE(3) {  // a copy out reads what the vector unit wrote
    Duplicate(work, 1.0f, 64);
    DataCopy(b.y, work, 64);
  }
  CASE(4) {
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_MTE3>();
    DataCopy(b.y, work, 64);
  }
  CASE(5) {  // the vector unit reads what a copy brings
    DataCopy(work, b.x, 64);
    Adds(more, work, 1.0f, 64);
  }
  CASE(6) {  // a copy overwrites what the vector unit may still read
    Duplicate(work, 1.0f, 64);
    PipeBarrier<PIPE_V>();
    Adds(more, work, 1.0f, 64);
    DataCopy(work, b.x, 64);
  }
  CASE(7) {  // the scalar unit reads what the vector unit wrote
    Duplicate(work, 1.0f, 64);
    work.GetValue(0);
  }
  CASE(8) {
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_S>();
    work.GetValue(0);
    work.SetValue(0, 2.0f);
    b.Sync<HardEvent::S_V>();
    Adds(more, work, 1.0f, 64);
  }
  CASE(9) {  // … or writes what the vector unit will read
    work.SetValue(0, 2.0f);
    Adds(more, work, 1.0f, 8);
  }
  CASE(10) {  // knowledge travels: MTE2 to V to MTE3
    DataCopy(work, b.x, 64);
    b.Sync<HardEvent::MTE2_V>();
    b.Sync<HardEvent::V_MTE3>();
    DataCopy(b.y, work, 64);
  }
  CASE(11) {  // global memory: read back what was written, too early
    DataCopy(work, b.x, 64);
    b.Sync<HardEvent::MTE2_MTE3>();
    DataCopy(b.y, work, 64);
    DataCopy(more, b.y, 64);
  }
  CASE(12) {
    DataCopy(work, b.x, 64);
    b.Sync<HardEvent::MTE2_MTE3>();
    DataCopy(b.y, work, 64);
    b.Sync<HardEvent::MTE3_MTE2>();
    DataCopy(more, b.y, 64);
  }
  CASE(20) DataCopy(work, b.x, 63);                        // the tail would be lost
  CASE(21) DataCopy(work[1], b.x, 64);                     // no multiple of 32 bytes
  CASE(22) Adds(more, work[3], 1.0f, 8);                   // nor here
  CASE(23) DataCopy(work, b.x, 1024);                      // 4 KB into a buffer of 2
  CASE(24) DataCopy(work, b.x[4096 - 32], 64);             // past the end of the tensor
  CASE(25) {                                               // past the end of the allocation
    GlobalTensor<float> wide;
    wide.SetGlobalBuffer(reinterpret_cast<float*>(gx));
    DataCopy(work, wide[4096], 64);
  }
  CASE(26) DataCopyPad(work, b.x, DataCopyExtParams{5000, 4, 0, 0, 0}, DataCopyPadExtParams<float>{});
  CASE(27) {  // the byte count is no whole number of elements
    DataCopyPad(work, b.x, DataCopyExtParams{1, 6, 0, 0, 0}, DataCopyPadExtParams<float>{});
  }
  CASE(28) {
    auto wide = b.work.Get<float>();
    Muls(wide, wide, 1.0f, 64, 0, {1, 1, 8, 8});  // no repeats: nothing happens
    Adds(more, wide, 1.0f, 65, 1, {1, 1, 8, 8});  // 65 lanes of 64
  }
  CASE(30) {  // a tensor that is never freed
    auto loaded = b.Loaded();
    Adds(work, loaded, 1.0f, 64);
  }
  CASE(31) {  // a third buffer of two
    b.in.AllocTensor<float>();
    b.in.AllocTensor<float>();
    b.in.AllocTensor<float>();
  }
  CASE(32) {  // two tensors in a queue of depth one
    auto first = b.in.AllocTensor<float>();
    auto second = b.in.AllocTensor<float>();
    b.in.EnQue(first);
    b.in.EnQue(second);
  }
  CASE(33) b.in.DeQue<float>();
  CASE(34) {
    auto wrong = b.out.AllocTensor<float>();
    b.in.EnQue(wrong);
  }
  CASE(35) {  // 200 KB
    TBuf<QuePosition::VECCALC> large;
    b.pipe.InitBuffer(large, 180 * 1024);
  }
  CASE(40) SetFlag<HardEvent::V_S>(0);
  CASE(41) WaitFlag<HardEvent::V_S>(0);
  CASE(42) {
    SetFlag<HardEvent::V_S>(0);
    SetFlag<HardEvent::V_S>(0);
  }
  CASE(43) SetFlag<HardEvent::V_S>(8);
  CASE(44) SetAtomicAdd<float>();
  CASE(45) {  // additions of another type
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_MTE3>();
    SetAtomicAdd<int32_t>();
    DataCopy(b.y, work, 64);
    SetAtomicNone();
  }
  CASE(50) SyncAll();
  CASE(51) {  // 63 floats: a comparison works on 256 bytes
    CompareScalar(b.more.Get<uint8_t>(), work, 0.0f, CMPMODE::GT, 63);
  }
  CASE(52) CompareScalar(b.more.Get<uint8_t>(), b.work.Get<int32_t>(), 0, CMPMODE::GT, 64);
  CASE(53) Cast(b.more.Get<bfloat16_t>(), work, RoundMode::CAST_NONE, 64);
  CASE(54) Adds(work[8], work, 1.0f, 64);  // overlap in part
  CASE(55) {                               // an offset outside of the source
    Duplicate(b.more.Get<int32_t>(), 4096, 64);
    PipeBarrier<PIPE_V>();
    Gather(b.work.Get<float>()[256], b.work.Get<float>(256), b.more.Get<uint32_t>(), 0u, 64);
  }
  CASE(56) {  // what is not written is poison
    auto fresh = b.through.AllocTensor<float>();
    DataCopy(b.y, fresh, 8);
    b.through.FreeTensor(fresh);
  }
  CASE(57) {  // the scalar unit's cache
    DataCopy(work, b.x, 64);
    b.Sync<HardEvent::MTE2_MTE3>();
    DataCopy(b.y, work, 64);
    b.Sync<HardEvent::MTE3_S>();
    b.y.GetValue(0);
  }
  CASE(58) {
    DataCopy(work, b.x, 64);
    b.Sync<HardEvent::MTE2_MTE3>();
    DataCopy(b.y, work, 64);
    b.Sync<HardEvent::MTE3_S>();
    DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE>(b.y);
    b.y.GetValue(0);
  }
  CASE(59) {  // tails of a padded copy: the first element unless something is said
    DataCopyPad(work, b.x[5], DataCopyExtParams{1, 12, 0, 0, 0}, DataCopyPadExtParams<float>{});
    DataCopyPad(work[8], b.x[5], DataCopyExtParams{1, 12, 0, 0, 0}, DataCopyPadExtParams<float>{true, 0, 5, -1.0f});
    b.Sync<HardEvent::MTE2_MTE3>();
    DataCopy(b.y, work, 16);
  }
  CASE(62) {  // a product of more than 32 bits
    Duplicate(b.work.Get<int32_t>(), 1 << 30, 64);
    PipeBarrier<PIPE_V>();
    Muls(b.more.Get<int32_t>(), b.work.Get<int32_t>(), 2, 64);
  }
  CASE(65) {  // a sum of more than 32 bits: as large as it can be
    Duplicate(b.work.Get<int32_t>(), 0x7ffffff0, 64);
    PipeBarrier<PIPE_V>();
    Adds(b.more.Get<int32_t>(), b.work.Get<int32_t>(), 100, 64);
    b.Sync<HardEvent::V_MTE3>();
    DataCopy(b.y, more, 64);
  }
  CASE(63) {  // lanes that bits choose: the second half of a block of floats, then all lanes that are even
    uint64_t late[2] = {0xf0f0f0f0f0f0f0f0ULL, 0}, even[2] = {0x5555555555555555ULL, 0};
    DataCopy(work, b.x, 128);
    Duplicate(more, -1.0f, 128);
    PipeBarrier<PIPE_V>();
    Duplicate(more, -2.0f, late, 2, 1, 8);
    b.Sync<HardEvent::MTE2_V>();
    PipeBarrier<PIPE_V>();
    Copy(more, work, even, 2, CopyRepeatParams{1, 1, 8, 8});
    b.Sync<HardEvent::V_MTE3>();
    DataCopy(b.y, more, 128);
  }
  CASE(64) {  // the last lane that is chosen lies outside
    uint64_t last[2] = {uint64_t{1} << 63, 0};
    Copy(b.more.Get<float>(120), work, last, 2, CopyRepeatParams{1, 1, 8, 8});
  }
  CASE(60) Converted<half>(b, gy);
  CASE(61) Converted<bfloat16_t>(b, gy);
  CASE(100) {  // cores: one writes what another reads, without SyncAll
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_MTE3>();
    DataCopy(b.space[GetBlockIdx() * 64], work, 64);
    if (GetBlockIdx() == 1) DataCopy(more, b.space, 64);
  }
  CASE(101) {
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_MTE3>();
    DataCopy(b.space[GetBlockIdx() * 64], work, 64);
    SyncAll();
    if (GetBlockIdx() == 1) DataCopy(more, b.space, 64);
  }
  CASE(102) {  // two cores write the same bytes
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_MTE3>();
    DataCopy(b.space, work, 64);
  }
  CASE(103) {  // … or add to them, which is legal
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_MTE3>();
    if (GetBlockIdx() == 0) DataCopy(b.y, work, 64);
    SyncAll();
    SetAtomicAdd<float>();
    DataCopy(b.y, work, 64);
    SetAtomicNone();
  }
  CASE(104) {  // … but reading the sum is not, before the next SyncAll
    Duplicate(work, 1.0f, 64);
    b.Sync<HardEvent::V_MTE3>();
    SetAtomicAdd<float>();
    DataCopy(b.y, work, 64);
    SetAtomicNone();
    b.Sync<HardEvent::MTE3_MTE2>();
    DataCopy(more, b.y, 64);
  }
  CASE(105) {  // a core that does not come
    if (GetBlockIdx() != 1) SyncAll();
  }
}
