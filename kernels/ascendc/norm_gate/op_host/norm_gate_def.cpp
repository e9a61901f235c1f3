// NormGate for CANN: tiling, shapes, definition.
#include "norm_gate_tiling.h"
#include "row_norm_cann.h"

namespace optiling {

static ge::graphStatus NormGateTilingFunc(gert::TilingContext* context) {
  turbogr::NormGateProblem problem = {};
  turbogr::row_norm_host::SetSizes(context, 0, &problem);
  problem.hasWeight = context->GetOptionalInputShape(2) != nullptr;
  problem.hasBias = context->GetOptionalInputShape(3) != nullptr;
  problem.eps = *context->GetAttrs()->GetFloat(0);
  return turbogr::SetLaunch<turbogr::NormGateTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

static graphStatus NormGateInferShape(gert::InferShapeContext* context) {
  const gert::Shape* x = context->GetInputShape(0);
  *context->GetOutputShape(0) = *x;
  for (size_t output = 1; output < 3; ++output) {
    gert::Shape* stat = context->GetOutputShape(output);
    *stat = *x;
    stat->SetDimNum(x->GetDimNum() == 0 ? 0 : x->GetDimNum() - 1);
  }
  return ge::GRAPH_SUCCESS;
}

static graphStatus NormGateInferDataType(gert::InferDataTypeContext* context) {
  context->SetOutputDataType(0, context->GetInputDataType(0));
  context->SetOutputDataType(1, ge::DT_FLOAT);
  context->SetOutputDataType(2, ge::DT_FLOAT);
  return ge::GRAPH_SUCCESS;
}

}  // namespace ge

namespace ops {

class NormGate : public OpDef {
 public:
  explicit NormGate(const char* name) : OpDef(name) {
    using namespace turbogr::row_norm_host;
    this->Input("x").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Input("gate").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Input("weight").ParamType(OPTIONAL).DataType(VectorTypes()).Format(Formats());
    this->Input("bias").ParamType(OPTIONAL).DataType(VectorTypes()).Format(Formats());
    this->Output("result").ParamType(REQUIRED).DataType(RowTypes()).Format(Formats());
    this->Output("mean").ParamType(REQUIRED).DataType(StatTypes()).Format(Formats());
    this->Output("rstd").ParamType(REQUIRED).DataType(StatTypes()).Format(Formats());
    this->Attr("eps").AttrType(REQUIRED).Float();
    this->SetInferShape(ge::NormGateInferShape);
    this->SetInferDataType(ge::NormGateInferDataType);
    this->AICore().SetTiling(optiling::NormGateTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(NormGate);

}  // namespace ops
