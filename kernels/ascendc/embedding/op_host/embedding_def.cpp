// EmbeddingRows for CANN: tiling, shapes, definition.
#include "embedding_tiling.h"
#include "rows_cann.h"

namespace optiling {

static ge::graphStatus EmbeddingTilingFunc(gert::TilingContext* context) {
  const gert::Shape& weight = turbogr::InputShape(context, 0);
  const int64_t count = turbogr::InputShape(context, 1).GetShapeSize();
  const turbogr::EmbeddingProblem problem = {count, weight.GetDim(1), turbogr::InputBytes(context, 0),
                                             turbogr::VectorCores(context)};
  return turbogr::SetLaunch<turbogr::EmbeddingTiling>(context, problem);
}

}  // namespace optiling

namespace ge {

static graphStatus EmbeddingInferShape(gert::InferShapeContext* context) {
  const gert::Shape* weight = context->GetInputShape(0);
  const gert::Shape* ids = context->GetInputShape(1);
  gert::Shape* y = context->GetOutputShape(0);
  *y = *ids;
  y->AppendDim(weight->GetDim(1));
  return ge::GRAPH_SUCCESS;
}

static graphStatus EmbeddingInferDataType(gert::InferDataTypeContext* context) {
  return context->SetOutputDataType(0, context->GetInputDataType(0));
}

}  // namespace ge

namespace ops {

class EmbeddingRows : public OpDef {
 public:
  explicit EmbeddingRows(const char* name) : OpDef(name) {
    this->Input("weight")
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
    this->Attr("padding_idx").AttrType(OPTIONAL).Int(-1);
    this->SetInferShape(ge::EmbeddingInferShape);
    this->SetInferDataType(ge::EmbeddingInferDataType);
    this->AICore().SetTiling(optiling::EmbeddingTilingFunc);
    this->AICore().AddConfig("ascend910b");
    this->AICore().AddConfig("ascend910_93");
  }
};

OP_ADD(EmbeddingRows);

}  // namespace ops
