// NormGateBackward for CANN: tiling, shapes, definition.
#include "norm_gate_backward_tiling.h"
#include "row_norm_cann.h"

namespace optiling {

static ge::graphStatus NormGateBackwardTilingFunc(gert::TilingContext* context) {
  turbogr::NormGateBackwardProblem problem = {};
  turbogr::row_norm_host::SetSizes(context, 1, &problem);
  problem.hasWeight = context->GetOptionalInputShape(3) != nullptr;
  problem.hasBias = context->GetOptionalInputShape(4) != nullptr;
  problem.wanted = *context->GetAttrs()->GetInt(0);
  return turbogr::SetLaunch<turbogr::NormGateBackwardTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

// A gradient that is not wanted has no elements, and neither has one of what is absent.
static graphStatus NormGateBackwardInferShape(gert::InferShapeContext* context) {
  const int64_t wanted = *context->GetAttrs()->GetInt(0);
  for (size_t i = 0; i < 4; ++i) {
    const gert::Shape* like = i < 2 ? context->GetInputShape(i + 1) : context->GetOptionalInputShape(i + 1);
    *context->GetOutputShape(i) = (wanted >> i & 1) != 0 && like != nullptr ? *like : gert::Shape({0});
  }
  return ge::GRAPH_SUCCESS;
}

static graphStatus NormGateBackwardInferDataType(gert::InferDataTypeContext* context) {
  const ge::DataType row = context->GetInputDataType(1);
  context->SetOutputDataType(0, row);
  context->SetOutputDataType(1, row);
  for (size_t i = 2; i < 4; ++i) {
    // Of an absent vector: any dtype, the gradient has no elements.
    const ge::DataType vector = context->GetOptionalInputDataType(i + 1);
    context->SetOutputDataType(i, vector == ge::DT_UNDEFINED ? row : vector);
  }
  return ge::GRAPH_SUCCESS;
}

}  // namespace ge

namespace ops {

class NormGateBackward : public OpDef {
 public:
  explicit NormGateBackward(const char* name) : OpDef(name) {
    using namespace turbogr::row_norm_host;
    this->Input("grad").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Input("x").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Input("gate").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Input("weight").ParamType(OPTIONAL).DataType(VectorTypes()).Format(Formats());
    this->Input("bias").ParamType(OPTIONAL).DataType(VectorTypes()).Format(Formats());
    this->Input("mean").ParamType(REQUIRED).DataType(StatTypes()).Format(Formats());
    this->Input("rstd").ParamType(REQUIRED).DataType(StatTypes()).Format(Formats());
    this->Output("grad_x").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Output("grad_gate").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Output("grad_weight").ParamType(REQUIRED).DataType(VectorTypes()).Format(Formats());
    this->Output("grad_bias").ParamType(REQUIRED).DataType(VectorTypes()).Format(Formats());
    this->Attr("wanted").AttrType(REQUIRED).Int();
    this->SetInferShape(ge::NormGateBackwardInferShape);
    this->SetInferDataType(ge::NormGateBackwardInferDataType);
    this->AICore().SetTiling(optiling::NormGateBackwardTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(NormGateBackward);

}  // namespace ops
