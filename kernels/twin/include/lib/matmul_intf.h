// The Matmul object: products of matrices in global memory, computed by the cube core for a vector core.
//
// IterateAll posts a message through MTE3, behind all that MTE3 was given before; the cube takes messages in order.
// Its result may be read behind WaitIterateAll. The two vector cores of a block share a cube core, so each is taken to
// have half of it.
#pragma once

#include "kernel_operator.h"
#include "kernel_tiling/kernel_tiling.h"

enum class CubeFormat { ND = 0, NZ, ZN, ZZ, NN, VECTOR };
enum class LayoutMode { NONE = 0, BSNGD, SBNGD, BNGS1S2, NORMAL };

namespace AscendC::twin {

template <typename T>
float AsFloat(T x) {
  return static_cast<float>(x);
}

inline uint32_t Up16(uint32_t x) { return (x + 15) / 16 * 16; }
inline uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

}  // namespace AscendC::twin

namespace matmul {

using AscendC::GlobalTensor;
using AscendC::TPosition;
namespace twin = AscendC::twin;

template <TPosition position, CubeFormat format, typename Type, bool transposed = false,
          LayoutMode layout = LayoutMode::NONE, bool shared = false>
struct MatmulType {
  static_assert(position == TPosition::GM && format == CubeFormat::ND, "the twin multiplies matrices in GM, format ND");
  static_assert(layout == LayoutMode::NONE && !shared, "batches and sharing are not emulated");
  using T = Type;
  static constexpr bool isTrans = transposed;
};

template <typename A, typename B, typename C>
class Matmul {
  using Left = typename A::T;
  using Right = typename B::T;
  using Result = typename C::T;
  static_assert(std::is_same_v<Left, Right> && twin::kOneOf<Left, half, bfloat16_t, float>, "types of A and B");
  static_assert(twin::kOneOf<Result, float, Left>, "type of C: float, or that of A and B");

 public:
  void Register(const TCubeTiling* tiling) {
    auto& core = twin::Me();
    core.instruction = "REGIST_MATMUL_OBJ";
    if (++core.matmuls > 4) twin::Fail("matmul-objects", "a kernel has at most 4 Matmul objects");
    if (core.ubUsed) twin::Fail("matmul-order", "REGIST_MATMUL_OBJ must precede InitBuffer");
    if (twin::Machine::The().task != KERNEL_TYPE_MIX_AIC_1_2) {
      twin::Fail("matmul-kernel-type", "Matmul objects need KERNEL_TYPE_MIX_AIC_1_2");
    }
    tiling_ = *tiling;
    CheckTiling();
    SetOrgShape(tiling_.M, tiling_.N, tiling_.Ka, tiling_.Kb);
    SetSingleShape(tiling_.singleCoreM, tiling_.singleCoreN, tiling_.singleCoreK);
  }

  void SetOrgShape(int m, int n, int k) { SetOrgShape(m, n, k, k); }
  void SetOrgShape(int m, int n, int ka, int kb, int kc = 0) {
    pitchA_ = A::isTrans ? m : ka;
    plainPitchA_ = ka;
    pitchB_ = B::isTrans ? kb : n;
    plainPitchB_ = n;
    pitchC_ = kc ? kc : n;
  }
  void SetSingleShape(int m, int n, int k) { SetTail(m, n, k); }
  void SetTail(int m = -1, int n = -1, int k = -1) {
    if (m >= 0) m_ = m;
    if (n >= 0) n_ = n;
    if (k >= 0) k_ = k;
    if (m_ > tiling_.singleCoreM || n_ > tiling_.singleCoreN || k_ > tiling_.singleCoreK) {
      twin::Fail("matmul-shape", "a product of %d x %d x %d with a tiling for %d x %d x %d", m_, n_, k_,
                 tiling_.singleCoreM, tiling_.singleCoreN, tiling_.singleCoreK);
    }
  }
  void SetTensorA(const GlobalTensor<Left>& a, bool transposed = false) {
    if (transposed && !A::isTrans) twin::Fail("matmul-transpose", "A is transposed, its MatmulType is not");
    a_ = a;
    transposedA_ = transposed;
  }
  void SetTensorB(const GlobalTensor<Right>& b, bool transposed = false) {
    if (transposed && !B::isTrans) twin::Fail("matmul-transpose", "B is transposed, its MatmulType is not");
    b_ = b;
    transposedB_ = transposed;
  }
  void DisableBias() {}

  template <bool sync = true>
  void IterateAll(const GlobalTensor<Result>& c, uint8_t enAtomic = 0, bool enSequentialWrite = false,
                  bool waitIterateAll = false, bool fakeMsg = false) {
    auto& core = twin::Me();
    core.instruction = "IterateAll";
    if (enSequentialWrite || fakeMsg || enAtomic > 1) twin::Fail("matmul-mode", "a form of IterateAll that is not emulated");
    if (awaited_) twin::Fail("matmul-not-awaited", "IterateAll while nobody has waited for the last one");
    if (m_ <= 0 || n_ <= 0 || k_ <= 0) twin::Fail("matmul-shape", "a product of %d x %d x %d", m_, n_, k_);
    // The message goes through MTE3, so the cube starts behind what MTE3 and the scalar unit know to be complete.
    core.clock.Barrier(PIPE_MTE3);
    core.clock.Learn(PIPE_M, core.clock.After(PIPE_MTE3));
    Multiply(c, enAtomic);
    done_ = core.clock.After(PIPE_M);
    if (sync) {
      Wait();
    } else if (waitIterateAll) {
      awaited_ = true;
      ++core.pending;
    }
  }
  void WaitIterateAll() {
    if (!awaited_) twin::Fail("matmul-not-awaited", "WaitIterateAll without an IterateAll that is waited for: it would hang");
    awaited_ = false;
    --twin::Me().pending;
    Wait();
  }
  void End() {}

 private:
  void Wait() { twin::Me().clock.Learn(PIPE_S, done_); }

  void CheckTiling() const {
    const auto& t = tiling_;
    const int bytes = sizeof(Left);
    const bool aligned = t.baseM % 16 == 0 && t.baseN % 16 == 0 && t.baseK % (32 / bytes) == 0;
    const bool positive = t.baseM > 0 && t.baseN > 0 && t.baseK > 0 && t.depthA1 > 0 && t.depthB1 > 0;
    const bool l0 = t.baseM * t.baseK * bytes * t.dbL0A <= 65536 && t.baseN * t.baseK * bytes * t.dbL0B <= 65536;
    const bool l0c = t.baseM * t.baseN * 4 * t.dbL0C <= 131072;
    const bool l1 = (t.baseM * t.depthA1 + t.baseN * t.depthB1) * t.baseK * bytes <= 524288;
    if (!aligned || !positive || !l0 || !l0c || !l1) {
      twin::Fail("matmul-tiling", "base %d x %d x %d (depths %d, %d) does not fit the buffers of the cube core", t.baseM,
                 t.baseN, t.baseK, t.depthA1, t.depthB1);
    }
  }

  // Each tile of C reads its rows of A and columns of B anew, by way of the L2 cache.
  double Cycles() const {
    const double m = twin::Up16(m_), n = twin::Up16(n_), k = twin::Up16(k_), bytes = sizeof(Left);
    const double rows = twin::CeilDiv(m_, tiling_.baseM), columns = twin::CeilDiv(n_, tiling_.baseN);
    const double product = m * n * k / (bytes == 4 ? twin::rates::kMacsFloat : twin::rates::kMacsHalf);
    const double all = (double(m_) * k_ * columns + double(n_) * k_ * rows) * bytes;
    const double fresh = Fresh(a_, transposedA_, m_, transposedA_ ? pitchA_ : plainPitchA_) +
                         Fresh(b_, !transposedB_, n_, transposedB_ ? pitchB_ : plainPitchB_);
    const double load = all / twin::rates::kL2Bytes;
    const double feed = std::max(m * k * columns * bytes / twin::rates::kL0aBytes, n * k * rows * bytes / twin::rates::kL0bBytes);
    const double result = double(m_) * n_ * sizeof(Result), store = result / twin::rates::kFixpipeBytes;
    auto& counters = twin::Me().counters;
    counters.macs += double(m_) * n_ * k_;
    counters.cubeCycles += product;
    counters.cubeLoadCycles += load;
    counters.cubeStoreCycles += store;
    counters.bytes["memory to L1"] += fresh;
    counters.bytes["L2 to L1"] += all - fresh;
    counters.bytes["L0C to L2"] += result;
    return std::max(std::max(product, load), std::max(feed, store)) * twin::rates::kVectorsPerCube;
  }

  template <typename T>
  double Fresh(const GlobalTensor<T>& x, bool across, int size, int pitch) const {
    const int rows = across ? k_ : size, columns = across ? size : k_;
    double fresh = 0;
    for (int r = 0; r < rows; ++r) fresh += twin::FreshBytes(x.At(size_t(r) * pitch, columns), columns * sizeof(T), "Matmul");
    return fresh;
  }

  void Multiply(const GlobalTensor<Result>& c, bool add) {
    twin::Instruction instruction("Matmul", PIPE_M, Cycles());
    const auto a = Load(instruction, a_, transposedA_, m_, k_, transposedA_ ? pitchA_ : plainPitchA_);
    const auto b = Load(instruction, b_, !transposedB_, n_, k_, transposedB_ ? pitchB_ : plainPitchB_);
    std::vector<float> row(n_);
    for (int i = 0; i < m_; ++i) {
      std::fill(row.begin(), row.end(), 0.0f);
      for (int k = 0; k < k_; ++k) {
        const float x = a[size_t(i) * k_ + k];
        const float* y = &b[size_t(k) * n_];
        for (int j = 0; j < n_; ++j) row[j] += x * y[j];
      }
      Store(instruction, c, i, row, add);
    }
  }

  // A as (rows, k) and B as (k, columns), whichever way they lie: `across` where k is the first dimension in memory.
  template <typename T>
  std::vector<float> Load(twin::Instruction& by, const GlobalTensor<T>& x, bool across, int size, int k, int pitch) const {
    const bool isB = static_cast<const void*>(&x) == static_cast<const void*>(&b_);
    const int rows = across ? k : size, columns = across ? size : k;
    std::vector<float> found(size_t(rows) * columns);
    if (pitch < columns) twin::Fail("matmul-shape", "rows of %d elements that are %d apart", columns, pitch);
    for (int r = 0; r < rows; ++r) {
      const T* from = x.At(size_t(r) * pitch, columns);
      by.ReadGlobal(from, columns * sizeof(T));
      for (int c = 0; c < columns; ++c) {
        const bool turn = isB ? !across : across;
        found[turn ? size_t(c) * rows + r : size_t(r) * columns + c] = twin::AsFloat(from[c]);
      }
    }
    return found;
  }

  void Store(twin::Instruction& by, const GlobalTensor<Result>& c, int i, const std::vector<float>& row, bool add) const {
    if (pitchC_ < n_) twin::Fail("matmul-shape", "rows of C of %d elements that are %d apart", n_, pitchC_);
    Result* to = c.At(size_t(i) * pitchC_, n_);
    by.WriteGlobal(to, n_ * sizeof(Result), add);
    twin::FreshBytes(to, n_ * sizeof(Result), "Matmul");  // from now on it is in L2
    twin::FreshBytes(to, n_ * sizeof(Result), "Matmul");  // what the cube has written is in L2
    for (int j = 0; j < n_; ++j) to[j] = Result(row[j] + (add ? twin::AsFloat(to[j]) : 0.0f));
  }

  TCubeTiling tiling_;
  GlobalTensor<Left> a_;
  GlobalTensor<Right> b_;
  bool transposedA_ = false, transposedB_ = false, awaited_ = false;
  int m_ = 0, n_ = 0, k_ = 0;
  int pitchA_ = 0, plainPitchA_ = 0, pitchB_ = 0, plainPitchB_ = 0, pitchC_ = 0;
  twin::Knowledge done_;
};

}  // namespace matmul

namespace AscendC::twin {

inline void RegisterAll() {}
template <typename M, typename... Rest>
void RegisterAll(M& object, const TCubeTiling* tiling, Rest&&... rest) {
  object.Register(tiling);
  RegisterAll(std::forward<Rest>(rest)...);
}

}  // namespace AscendC::twin

#define REGIST_MATMUL_OBJ(pipe, workspace, ...) ((void)(pipe), (void)(workspace), AscendC::twin::RegisterAll(__VA_ARGS__))
