// SampledSoftmax for CANN: tiling, shapes, definition.
#include "sampled_softmax_cann.h"
#include "sampled_softmax_tiling.h"

namespace optiling {

static ge::graphStatus SampledSoftmaxTilingFunc(gert::TilingContext* context) {
  turbogr::SampledSoftmaxProblem problem = {};
  turbogr::sampled_host::SetSizes(context, 0, &problem);
  return turbogr::SetLaunch<turbogr::SampledSoftmaxTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

static graphStatus SampledSoftmaxInferShape(gert::InferShapeContext* context) {
  for (size_t output = 0; output < 2; ++output) {
    *context->GetOutputShape(output) = gert::Shape({context->GetInputShape(0)->GetDim(0)});
  }
  return ge::GRAPH_SUCCESS;
}

static graphStatus SampledSoftmaxInferDataType(gert::InferDataTypeContext* context) {
  context->SetOutputDataType(0, ge::DT_FLOAT);
  context->SetOutputDataType(1, ge::DT_FLOAT);
  return ge::GRAPH_SUCCESS;
}

}  // namespace ge

namespace ops {

class SampledSoftmax : public OpDef {
 public:
  explicit SampledSoftmax(const char* name) : OpDef(name) {
    using namespace turbogr::sampled_host;
    this->Input("query").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Input("positive").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Input("negative").ParamType(REQUIRED).DataType(SampledRowTypes()).Format(SampledFormats());
    this->Input("query_offsets").ParamType(REQUIRED).DataType(SampledOffsetTypes()).Format(SampledFormats());
    this->Input("negative_offsets").ParamType(REQUIRED).DataType(SampledOffsetTypes()).Format(SampledFormats());
    this->Input("positive_ids").ParamType(OPTIONAL).DataType(SampledIdTypes()).Format(SampledFormats());
    this->Input("negative_ids").ParamType(OPTIONAL).DataType(SampledIdTypes()).Format(SampledFormats());
    this->Input("negative_scales").ParamType(OPTIONAL).DataType(SampledFloatTypes()).Format(SampledFormats());
    this->Output("loss").ParamType(REQUIRED).DataType(SampledFloatTypes()).Format(SampledFormats());
    this->Output("log_sum").ParamType(REQUIRED).DataType(SampledFloatTypes()).Format(SampledFormats());
    this->Attr("scale").AttrType(REQUIRED).Float();
    this->SetInferShape(ge::SampledSoftmaxInferShape);
    this->SetInferDataType(ge::SampledSoftmaxInferDataType);
    this->AICore().SetTiling(optiling::SampledSoftmaxTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(SampledSoftmax);

}  // namespace ops
