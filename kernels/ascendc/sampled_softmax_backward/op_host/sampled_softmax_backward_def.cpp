// SampledSoftmaxBackward for CANN: tiling, shapes, definition.
#include "sampled_softmax_backward_tiling.h"
#include "sampled_softmax_cann.h"

namespace optiling {

static ge::graphStatus SampledSoftmaxBackwardTilingFunc(gert::TilingContext* context) {
  turbogr::SampledSoftmaxBackwardProblem problem = {};
  turbogr::sampled_host::SetSizes(context, 2, &problem);
  problem.wanted = *context->GetAttrs()->GetInt(1);
  return turbogr::SetLaunch<turbogr::SampledSoftmaxBackwardTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

// A gradient that is not wanted has no elements.
static graphStatus SampledSoftmaxBackwardInferShape(gert::InferShapeContext* context) {
  const int64_t wanted = *context->GetAttrs()->GetInt(1);
  for (size_t i = 0; i < 3; ++i) {
    *context->GetOutputShape(i) = (wanted >> i & 1) != 0 ? *context->GetInputShape(i + 2) : gert::Shape({0});
  }
  return ge::GRAPH_SUCCESS;
}

static graphStatus SampledSoftmaxBackwardInferDataType(gert::InferDataTypeContext* context) {
  for (size_t i = 0; i < 3; ++i) {
    context->SetOutputDataType(i, context->GetInputDataType(2));
  }
  return ge::GRAPH_SUCCESS;
}

}  // namespace ge

namespace ops {

class SampledSoftmaxBackward : public OpDef {
 public:
  explicit SampledSoftmaxBackward(const char* name) : OpDef(name) {
    using namespace turbogr::sampled_host;
    this->Input("grad").ParamType(REQUIRED).DataType(SampledFloatTypes()).Format(SampledFormats());
    this->Input("log_sum").ParamType(REQUIRED).DataType(SampledFloatTypes()).Format(SampledFormats());
    this->Input("query").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Input("positive").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Input("negative").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Input("query_offsets").ParamType(REQUIRED).DataType(SampledOffsetTypes()).Format(SampledFormats());
    this->Input("negative_offsets").ParamType(REQUIRED).DataType(SampledOffsetTypes()).Format(SampledFormats());
    this->Input("positive_ids").ParamType(OPTIONAL).DataType(SampledIdTypes()).Format(SampledFormats());
    this->Input("negative_ids").ParamType(OPTIONAL).DataType(SampledIdTypes()).Format(SampledFormats());
    this->Input("negative_scales").ParamType(OPTIONAL).DataType(SampledFloatTypes()).Format(SampledFormats());
    this->Output("query_grad").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Output("positive_grad").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Output("negative_grad").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Attr("scale").AttrType(REQUIRED).Float();
    this->Attr("wanted").AttrType(REQUIRED).Int();
    this->SetInferShape(ge::SampledSoftmaxBackwardInferShape);
    this->SetInferDataType(ge::SampledSoftmaxBackwardInferDataType);
    this->AICore().SetTiling(optiling::SampledSoftmaxBackwardTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(SampledSoftmaxBackward);

}  // namespace ops
