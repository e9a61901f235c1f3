// JaggedAttention for CANN: tiling, shapes, definition.
#include "attention_cann.h"
#include "jagged_attention_tiling.h"

namespace optiling {

static ge::graphStatus JaggedAttentionTilingFunc(gert::TilingContext* context) {
  turbogr::AttentionProblem problem = {};
  turbogr::attention_host::SetProblem(context, 0, &problem);
  return turbogr::SetLaunch<turbogr::JaggedAttentionTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

static graphStatus JaggedAttentionInferShape(gert::InferShapeContext* context) {
  const gert::Shape* query = context->GetInputShape(0);
  const gert::Shape* value = context->GetInputShape(2);
  *context->GetOutputShape(0) = gert::Shape({query->GetDim(0), query->GetDim(1), value->GetDim(2)});
  const bool softmax = std::strcmp(context->GetAttrs()->GetStr(0), "softmax") == 0;
  *context->GetOutputShape(1) = softmax ? gert::Shape({query->GetDim(0), query->GetDim(1)}) : gert::Shape({0});
  return ge::GRAPH_SUCCESS;
}

static graphStatus JaggedAttentionInferDataType(gert::InferDataTypeContext* context) {
  context->SetOutputDataType(0, context->GetInputDataType(0));
  context->SetOutputDataType(1, ge::DT_FLOAT);
  return ge::GRAPH_SUCCESS;
}

}  // namespace ge

namespace ops {

class JaggedAttention : public OpDef {
 public:
  explicit JaggedAttention(const char* name) : OpDef(name) {
    using namespace turbogr::attention_host;
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
    this->Output("result").ParamType(REQUIRED).DataType(AttentionRowTypes()).Format(AttentionFormats());
    this->Output("log_sum").ParamType(REQUIRED).DataType(AttentionFloatTypes()).Format(AttentionFormats());
    this->Attr("activation").AttrType(REQUIRED).String();
    this->Attr("scale").AttrType(REQUIRED).Float();
    this->Attr("post_scale").AttrType(REQUIRED).Float();
    this->Attr("min_distance").AttrType(REQUIRED).Int();
    this->Attr("max_distance").AttrType(REQUIRED).Int();
    this->Attr("dropout").AttrType(REQUIRED).Float();
    this->Attr("score_cap").AttrType(OPTIONAL).Float(0.0);
    this->SetInferShape(ge::JaggedAttentionInferShape);
    this->SetInferDataType(ge::JaggedAttentionInferDataType);
    this->AICore().SetTiling(optiling::JaggedAttentionTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(JaggedAttention);

}  // namespace ops
