// EmbeddingBackward for CANN: tiling, shapes, definition.
#include "embedding_backward_tiling.h"
#include "rows_cann.h"

namespace optiling {

static ge::graphStatus EmbeddingBackwardTilingFunc(gert::TilingContext* context) {
  const gert::Shape& grad = turbogr::InputShape(context, 0);
  const int64_t entries = turbogr::InputShape(context, 1).GetShapeSize();
  const int64_t* count = context->GetAttrs()->GetInt(0);
  const int64_t* paddingIdx = context->GetAttrs()->GetInt(1);
  const turbogr::EmbeddingBackwardProblem problem = {
      entries, *count, grad.GetDim(grad.GetDimNum() - 1), *paddingIdx, turbogr::InputBytes(context, 0),
      turbogr::InputBytes(context, 1), turbogr::VectorCores(context)};
  if (!turbogr::RowScatterTakes(problem.entries, problem.count, problem.width, problem.bytes)) {
    return ge::GRAPH_FAILED;
  }
  return turbogr::SetLaunch<turbogr::EmbeddingBackwardTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

static graphStatus EmbeddingBackwardInferShape(gert::InferShapeContext* context) {
  const gert::Shape* grad = context->GetInputShape(0);
  gert::Shape* y = context->GetOutputShape(0);
  y->SetDimNum(2);
  y->SetDim(0, *context->GetAttrs()->GetInt(0));
  y->SetDim(1, grad->GetDim(grad->GetDimNum() - 1));
  return ge::GRAPH_SUCCESS;
}

static graphStatus EmbeddingBackwardInferDataType(gert::InferDataTypeContext* context) {
  return context->SetOutputDataType(0, context->GetInputDataType(0));
}

}  // namespace ge

namespace ops {

class EmbeddingBackward : public OpDef {
 public:
  explicit EmbeddingBackward(const char* name) : OpDef(name) {
    this->Input("grad")
        .ParamType(REQUIRED)
        .DataType({ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Input("ids")
        .ParamType(REQUIRED)
        .DataType({ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64, ge::DT_INT32, ge::DT_INT64})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Output("y")
        .ParamType(REQUIRED)
        .DataType({ge::DT_FLOAT16, ge::DT_FLOAT16, ge::DT_BF16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT})
        .Format({ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND, ge::FORMAT_ND});
    this->Attr("count").AttrType(REQUIRED).Int();
    this->Attr("padding_idx").AttrType(OPTIONAL).Int(-1);
    this->SetInferShape(ge::EmbeddingBackwardInferShape);
    this->SetInferDataType(ge::EmbeddingBackwardInferDataType);
    this->AICore().SetTiling(optiling::EmbeddingBackwardTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(EmbeddingBackward);

}  // namespace ops
