// JaggedAttentionBackward for CANN: tiling, shapes, definition.
#include "attention_cann.h"
#include "jagged_attention_backward_tiling.h"

namespace optiling {

static ge::graphStatus JaggedAttentionBackwardTilingFunc(gert::TilingContext* context) {
  turbogr::AttentionProblem problem = {};
  turbogr::attention_host::SetProblem(context, 3, &problem);
  problem.wanted = *context->GetAttrs()->GetInt(turbogr::attention_host::kWanted);
  if ((problem.wanted & turbogr::kWantBias) != 0 && problem.bias.keys > 0) {
    const gert::Shape& bias = context->GetOutputShape(3)->GetStorageShape();
    problem.gradSequences = bias.GetDim(0);
    problem.gradHeads = bias.GetDim(1);
  }
  return turbogr::SetLaunch<turbogr::JaggedAttentionBackwardTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

// Inputs that have a gradient, in the order of the gradients.
static constexpr size_t kGradientOf[] = {3, 4, 5, 12, 13, 14, 19};

static graphStatus JaggedAttentionBackwardInferShape(gert::InferShapeContext* context) {
  const int64_t wanted = *context->GetAttrs()->GetInt(turbogr::attention_host::kWanted);
  for (size_t output = 0; output < 7; ++output) {
    const gert::Shape* input = context->GetOptionalInputShape(kGradientOf[output]);
    const bool given = input != nullptr && (wanted >> output & 1) != 0;
    *context->GetOutputShape(output) = given ? *input : gert::Shape({0});
  }
  return ge::GRAPH_SUCCESS;
}

static graphStatus JaggedAttentionBackwardInferDataType(gert::InferDataTypeContext* context) {
  for (size_t output = 0; output < 7; ++output) {
    context->SetOutputDataType(output, output < 3 ? context->GetInputDataType(0) : ge::DT_FLOAT);
  }
  return ge::GRAPH_SUCCESS;
}

}  // namespace ge

namespace ops {

class JaggedAttentionBackward : public OpDef {
 public:
  explicit JaggedAttentionBackward(const char* name) : OpDef(name) {
    using namespace turbogr::attention_host;
    this->Input("grad").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Input("result").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Input("log_sum").ParamType(REQUIRED).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Input("query").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Input("key").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Input("value").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Input("query_offsets").ParamType(REQUIRED).DataType(AttentionIndexTypes()).Format(AttentionFormats());
    this->Input("key_offsets").ParamType(REQUIRED).DataType(AttentionIndexTypes()).Format(AttentionFormats());
    this->Input("query_columns").ParamType(REQUIRED).DataType(AttentionIndexTypes()).Format(AttentionFormats());
    this->Input("key_columns").ParamType(REQUIRED).DataType(AttentionIndexTypes()).Format(AttentionFormats());
    this->Input("key_valid").ParamType(OPTIONAL).DataType(AttentionBoolTypes()).Format(AttentionFormats());
    this->Input("pair_mask").ParamType(OPTIONAL).DataType(AttentionBoolTypes()).Format(AttentionFormats());
    this->Input("bias").ParamType(OPTIONAL).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Input("position_bias").ParamType(OPTIONAL).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Input("time_bias").ParamType(OPTIONAL).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Input("time_bounds").ParamType(OPTIONAL).DataType(AttentionTimeTypes()).Format(AttentionFormats());
    this->Input("query_times").ParamType(OPTIONAL).DataType(AttentionTimeTypes()).Format(AttentionFormats());
    this->Input("key_times").ParamType(OPTIONAL).DataType(AttentionTimeTypes()).Format(AttentionFormats());
    this->Input("dropout_seed").ParamType(OPTIONAL).DataType(AttentionSeedTypes()).Format(AttentionFormats());
    this->Input("sink").ParamType(OPTIONAL).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Output("query_grad").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Output("key_grad").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Output("value_grad").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Output("bias_grad").ParamType(REQUIRED).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Output("position_bias_grad").ParamType(REQUIRED).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Output("time_bias_grad").ParamType(REQUIRED).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Output("sink_grad").ParamType(REQUIRED).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Attr("activation").AttrType(REQUIRED).String();
    this->Attr("scale").AttrType(REQUIRED).Float();
    this->Attr("post_scale").AttrType(REQUIRED).Float();
    this->Attr("min_distance").AttrType(REQUIRED).Int();
    this->Attr("max_distance").AttrType(REQUIRED).Int();
    this->Attr("dropout").AttrType(REQUIRED).Float();
    this->Attr("score_cap").AttrType(OPTIONAL).Float(0.0);
    this->Attr("wanted").AttrType(REQUIRED).Int();
    this->SetInferShape(ge::JaggedAttentionBackwardInferShape);
    this->SetInferDataType(ge::JaggedAttentionBackwardInferDataType);
    this->AICore().SetTiling(optiling::JaggedAttentionBackwardTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(JaggedAttentionBackward);

}  // namespace ops
